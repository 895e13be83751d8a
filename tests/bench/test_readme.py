"""Tables of the README are what the result files give."""

from bench import readme


def test_the_committed_readme_has_the_tables_of_the_result_files():
    text = readme.README.read_text()
    assert readme.filled(text, readme.tables()) == text, "run python -m bench.readme"
    assert {match["name"] for match in readme.BLOCK.finditer(text)} >= {"kernels", "kernels-by-batch"}


def test_only_tables_that_are_made_are_replaced():
    blocks = "".join(f"<!-- table {name} -->\n\n{name}\n\n<!-- end of table -->\nb\n" for name in "vw")
    text = f"a\n{blocks}"
    made = {"v": "| new |\n| --- |", "x": "other"}
    assert readme.filled(text, made) == text.replace("\nv\n", "\n| new |\n| --- |\n")
