"""Tables of README.md and bench/RESULTS.md from result files.

A table stands between the lines `<!-- table NAME -->` and `<!-- end of table -->`; `bench.kernel_report`,
`bench.e2e_report`, `bench.drift_report` and `bench.forgotten_report` give the names. A table without records
stays as it is.

    python -m bench.readme
"""

import argparse
import re
from pathlib import Path

from bench import drift_report, e2e_report, forgotten_report, kernel_report, result_file

DOCUMENTS = result_file.RESULTS.parent.parent / "README.md", result_file.RESULTS.parent / "RESULTS.md"
BLOCK = re.compile(r"(<!-- table (?P<name>[\w-]+) -->\n).*?(?=<!-- end of table -->)", re.DOTALL)


def tables(folder: Path = result_file.RESULTS) -> dict[str, str]:
    """The tables by name, of the result files in a folder."""
    files = sorted(folder.glob("*.json"))
    kernels = e2e_report.read(files, "bench.kernel_decode")
    drift = e2e_report.read(files, "bench.precision_drift")
    forgotten = (e2e_report.read(files, f"bench.forgotten_{part}") for part in ("heads", "reads"))
    made = kernel_report.tables(kernels) | e2e_report.tables(files) | drift_report.tables(drift)
    return made | forgotten_report.tables(*forgotten)


def filled(text: str, made: dict[str, str]) -> str:
    """The text with its tables replaced by those of the same name."""

    def table(match: re.Match) -> str:
        return f"{match[1]}\n{made[match['name']]}\n\n" if match["name"] in made else match[0]

    return BLOCK.sub(table, text)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.parse_args()
    made = tables()
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text(), made))


if __name__ == "__main__":
    main()
