"""No secret of a config is printed or saved."""

import pytest
import torch
from deepspeed.config import DeepSpeedConfig, redacted
from deepspeed.errors import ConfigError

SECRET = "hunter2-hunter2"

SECRETS = {
    "train_batch_size": 1,
    "comet": {"api_key": SECRET, "project": "shown"},
    "monitor_plugins": {"mine": {"webhook": SECRET, "where": {"list": [SECRET]}, "every": 3}},
    "of a library": {"apiKey": SECRET, "API-KEY": SECRET, "credentials": {"user": SECRET}, "password": 271828},
    "optimizer": {"type": "Adam", "params": {"auth_token": SECRET, "lr": 0.25}},
    "checkpoint": {"store": {"params": {"secret_access_key": SECRET, "url": f"s3://me:{SECRET}@host/b"}}},
    "max_tokens": 512,
}


@pytest.mark.parametrize("key", ["api_key", "apiKey", "API-KEY", "hf_token", "password", "client_secret", "credentials",
                                 "AWS_SECRET_ACCESS_KEY", "private_key", "connection_string", "dsn",
                                 "token_value", "auth", "jwt", "cookie", "session_key", "ssh_key"])  # fmt: skip
def test_keys_that_say_so(key):
    assert redacted({"a": [{key: SECRET}]}) == {"a": [{key: "<redacted>"}]}
    assert redacted(SECRET, f"some.section.{key}") == "<redacted>"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("max_tokens", 512),
        ("tokenizer", "gpt2"),
        ("layer_token_lr_schedule", {"total_layer_tokens": 10}),
        ("experiment_key", "name-of-the-run"),
        ("betas", [0.9, 0.99]),
        ("api_key", None),
        ("api_key", ""),
        ("keep_password", False),
    ],
)
def test_what_is_no_secret_stays(key, value):
    assert redacted({key: value}) == {key: value}


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"https://me:p@{SECRET}@host/path", "https://<redacted>@host/path"),
        (f"https://host/x?a=1&api_key={SECRET}", "https://host/x?a=1&api_key=<redacted>"),
        (f"https://host/x?token={SECRET}&a=1#b", "https://host/x?token=<redacted>&a=1#b"),
        (f"https://blob/x?sv=1&sig={SECRET}", "https://blob/x?sv=1&sig=<redacted>"),
        (f"https://s3/x?X-Amz-Signature={SECRET}", "https://s3/x?X-Amz-Signature=<redacted>"),
        ("https://host/@team?page=2", "https://host/@team?page=2"),
    ],
)
def test_secrets_in_urls(url, shown):
    assert redacted({"where": [url]}) == {"where": [shown]}


def test_values_that_are_no_json_pass():
    array = torch.ones(2)  # `in` compares, which has no single truth value here
    assert redacted({"mine": {"weights": array}})["mine"]["weights"] is array


def test_the_users_dict_is_not_changed():
    written = {"comet": {"api_key": SECRET}}
    redacted(written)
    assert written == {"comet": {"api_key": SECRET}}


def test_no_way_to_print_a_config_shows_a_secret(lines):
    config = DeepSpeedConfig(SECRETS)
    assert config.comet.api_key == SECRET
    config.print("settings")
    said = "\n".join([text for _, text in lines] + [config.describe(), repr(config), str(config.comet),
                                                   repr(config.monitor_config), repr(redacted(SECRETS))])  # fmt: skip
    assert SECRET not in said
    assert "271828" not in said
    for value in ("shown", "0.25", "512", "'every': 3"):
        assert value in said


@pytest.mark.parametrize(
    "written",
    [
        {"comet": {"api_key": [SECRET]}},
        {"comet": [{"api_key": SECRET}]},
        {"monitor_plugins": {"mine": [SECRET]}},
        f'{{"comet": {{"api_key": "{SECRET}", "api_key": "{SECRET}2"}}}}',
        f'{{"nebula": {{"enabled": true, "password": "{SECRET}"}}}}',
        {"quantize_training": {"enabled": True, "token": SECRET}},
    ],
)
def test_no_error_shows_a_secret(written):
    with pytest.raises(ConfigError) as raised:
        DeepSpeedConfig(written if isinstance(written, str) else {"train_batch_size": 1, **written}).check_supported()
    assert SECRET not in str(raised.value)


def test_a_number_that_was_written_as_text_is_shown():
    """Under a key that takes numbers, however it is called, no secret can stand."""
    with pytest.raises(ConfigError, match=r"autotuning.max_train_batch_size: found '512'; allowed: .* without quotes"):
        DeepSpeedConfig({"train_batch_size": 1, "autotuning": {"max_train_batch_size": "512"}})
