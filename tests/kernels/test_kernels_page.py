"""The code in docs/kernels.md runs as it stands there and prints what it says."""

import re
from pathlib import Path

import graphrl.kernels

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def test_every_block_prints_what_stands_behind_it(capsys):
    namespace: dict = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 9
    for block in blocks:
        exec(block, namespace)  # one page, one program
        said = [re.search(r"  # (.*)$", line) for line in block.splitlines() if line.startswith("print(")]
        assert all(said), block
        assert capsys.readouterr().out.splitlines() == [match[1] for match in said if match], block


def test_every_kernel_is_on_the_page_and_in_the_table_of_the_folder():
    page, table = PAGE.read_text(), (PAGE.parents[1] / "kernels" / "README.md").read_text()
    for name in graphrl.kernels.__all__:
        assert f"`{name}`" in table, name
        assert f"`{name}`" in page or name.startswith("sum_tree_"), name
