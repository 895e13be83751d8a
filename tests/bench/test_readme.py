"""Tables of the documents are what the result files give."""

from bench import readme


def test_the_committed_documents_have_the_tables_of_the_result_files():
    made, names = readme.tables(), []
    for document in readme.DOCUMENTS:
        text = document.read_text()
        assert readme.filled(text, made) == text, "run python -m bench.readme"
        names.append({match["name"] for match in readme.BLOCK.finditer(text)})
    assert {"kernels", "precision"} <= names[0]
    assert names[1] >= set(made) - names[0]


def test_only_tables_that_are_made_are_replaced():
    blocks = "".join(f"<!-- table {name} -->\n\n{name}\n\n<!-- end of table -->\nb\n" for name in "vw")
    text = f"a\n{blocks}"
    made = {"v": "| new |\n| --- |", "x": "other"}
    assert readme.filled(text, made) == text.replace("\nv\n", "\n| new |\n| --- |\n")
