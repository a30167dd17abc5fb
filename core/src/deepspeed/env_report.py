"""`python -m deepspeed.env_report`: DeepSpeed's name of `ds_report`. The report itself is in `cli/report.py`."""

import sys

from deepspeed._absent import complete
from deepspeed.cli import report


def main(hide_operator_status: bool = False, hide_errors_and_warnings: bool = False) -> None:
    """Print the report. Scripts call it; it ignores the process's arguments."""
    flags = {"--hide_operator_status": hide_operator_status, "--hide_errors_and_warnings": hide_errors_and_warnings}
    report.main([flag for flag, wanted in flags.items() if wanted])


def cli_main() -> int:
    """Run the command `ds_report` with the process's arguments; return the exit code."""
    return report.main()


complete(__name__)

if __name__ == "__main__":
    sys.exit(cli_main())
