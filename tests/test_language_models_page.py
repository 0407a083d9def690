"""The page that benchmarks/language_models writes: what it keeps, and which ratios it says."""

from language_models import page

TIMES = {
    ("prefill 128", "XLA float32"): [500.0, 510.0, 400.0],
    ("prefill 128", "int4"): [1500.0, 1300.0, 1200.0],
    ("decode at 128", "llama.cpp Q4_0"): [80.0, 90.0, 100.0],
    ("decode at 128", "llama.cpp native Q4_0"): [120.0, 100.0, 110.0],
    ("decode at 128", "int4"): [220.0, 230.0, 110.0],
}


def test_ratios_are_beside_the_best_of_the_others():
    rows = [row.strip("| ").split(" | ") for row in page.ratios(TIMES).splitlines()[2:]]
    decode, prefill = rows
    native = "2.00 (llama.cpp native Q4_0)"
    assert decode == ["int4 decodes, beside llama.cpp Q4_0", "decode at 128", native, "1.2"]
    assert prefill == ["int4 prefill, beside XLA float32", "prefill 128", "2.60", "2.3"]


def test_a_table_has_medians_and_leaves_out_what_was_not_measured():
    header, _, *rows = page.table(TIMES, {"int4": 153e6, "llama.cpp Q4_0": 139e6}).splitlines()
    assert header == "| | MB | prefill 128 | decode at 128 |"
    assert rows == [
        "| int4 | 153 | 1300 (1200-1500) | 220 (110-230) |",
        "| llama.cpp Q4_0 | 139 |  | 90.0 (80-100) |",
    ]


def test_a_part_replaces_its_own_block_alone(tmp_path):
    file, order = tmp_path / "page.md", ["213M", "0.5B"]
    file.write_text(f"# Title\n\ntext\n\n{page.MARK}\n\nold\n")
    page.write(file, "0.5B", [("0.5B:", "| b |")], order)
    page.write(file, "213M", [("213M:", "| a |"), ("Ratios:", "| r |")], order)
    page.write(file, "0.5B", [("0.5B:", "| c |")], order)
    above, _, below = file.read_text().partition(page.MARK)
    assert above == "# Title\n\ntext\n\n"
    line = page.machine()
    assert ", Python " in line  # what tools/bench_charts looks for
    blocks = [f"\n\n<!-- part 213M -->\n\n{line}\n\n213M:\n\n| a |\n\nRatios:\n\n| r |\n"]
    blocks.append(f"\n<!-- part 0.5B -->\n\n{line}\n\n0.5B:\n\n| c |\n")
    assert below == "".join(blocks)
