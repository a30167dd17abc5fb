"""The list of expected failures: names, cases, reasons, and what is refused."""

import pytest
from deepspeed.errors import ConfigError
from deepspeed.testing.suite.fixtures import path_of_list, read_expected_failures, unknown_names


@pytest.fixture
def listed(tmp_path):
    def write(text):
        path = tmp_path / "expected_failures.txt"
        path.write_text(text)
        return path

    return write


def test_names_cases_and_comments(listed):
    path = listed("# a title\n\ntest_a  # slow clock\n  test_b[fp16-0] # ticket #12\n")
    assert read_expected_failures(path) == {"test_a": "slow clock", "test_b[fp16-0]": "ticket #12"}


def test_no_list_is_an_empty_one(tmp_path):
    assert read_expected_failures(tmp_path / "none.txt") == {}


def test_what_is_no_text_is_refused(tmp_path):
    path = tmp_path / "expected_failures.txt"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"expected_failures.txt: not UTF-8 text$"):
        read_expected_failures(path)


def test_the_list_lies_beside_the_tests_unless_it_is_given(request, tmp_path):
    assert path_of_list(request.config, tmp_path / "test_a.py") == tmp_path / "expected_failures.txt"


def test_a_case_is_known_by_its_test():
    assert unknown_names(["test_a[1]", "test_b", "test_c[2]"], ["test_a", "test_b"]) == ["test_c[2]"]


@pytest.mark.parametrize(
    ("text", "told"), [("test_a\n", "line 1: test_a has no reason"), ("test_a # x\ntest_a # y", "line 2: .*twice")]
)
def test_what_is_refused(listed, text, told):
    with pytest.raises(ConfigError, match=told):
        read_expected_failures(listed(text))
