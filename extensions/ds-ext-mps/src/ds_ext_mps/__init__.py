"""Apple's GPUs as a DeepSpeed accelerator. Loads nothing. May import `deepspeed` and torch; read `plugin.py` next."""
