"""LoRA adapters of PEFT on a frozen tiny GPT-2, trained by the Trainer; run by `test_train.py` on two ranks.

    export PYTHONPATH=downstream/shared
    deepspeed --num_accelerators 2 --no_local_rank train.py --stage 2 --folder out

Writes loss and gradient norm of each step to `<folder>/result.json`, and the adapter to `<folder>/adapter`.
`--stage none` trains without DeepSpeed.
"""

import json

from hugging_face import common_arguments, ds_config, read_log
from peft import LoraConfig, get_peft_model
from task import create_model, create_samples, parse
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed


def main() -> None:
    parser = parse(__doc__)
    parser.add_argument("--from-pretrained", help="a folder with a saved model to adapt")
    parser.add_argument("--checkpointing", choices=("reentrant", "not-reentrant"), help="of activations")
    args = parser.parse_args()

    set_seed(0)
    config = ds_config(int(args.stage)) if args.stage != "none" else None
    checkpointing = {
        "gradient_checkpointing": args.checkpointing is not None,
        "gradient_checkpointing_kwargs": {"use_reentrant": args.checkpointing == "reentrant"},
    }
    arguments = TrainingArguments(**common_arguments(args, config) | checkpointing | {"learning_rate": 5e-2})
    if args.from_pretrained:
        model = AutoModelForCausalLM.from_pretrained(args.from_pretrained)
    else:
        model = create_model()
    if args.checkpointing:
        model.enable_input_require_grads()
    set_seed(0)  # the adapters have the same random weights in every run
    adapters = LoraConfig(r=4, target_modules=["c_attn", "c_fc"], modules_to_save=["ln_f"], fan_in_fan_out=True)
    model = get_peft_model(model, adapters)
    set_seed(0)
    trainer = Trainer(model=model, args=arguments, train_dataset=create_samples(256))
    trainer.train()
    trainer.save_model(str(args.folder / "adapter"))

    if trainer.is_world_process_zero():
        trainable, total = model.get_nb_trainable_parameters()
        result = {"trainable": trainable, "total": total, **read_log(trainer)}
        (args.folder / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
