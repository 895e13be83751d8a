"""What a result file tells of its run."""

from bench.result_file import measured


def test_the_command_leaves_out_files_of_the_machine():
    given = "--lock /a/b --batches 1,2 --out=/c --outer 3 --commit x --out /d".split()
    assert measured(given) == "--batches 1,2 --outer 3 --commit x".split()
