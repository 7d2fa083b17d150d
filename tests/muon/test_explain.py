"""What `explain()` shows: rows that are alike as one line, in print and in notebooks, with what they cost."""

import importlib
import re
from html.parser import HTMLParser

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from tests.support.small_model import named_parameters, take_steps

SMALL = {"ns_dtype": "float32"}


@pytest.fixture(scope="module")
def writing(kernel):
    return importlib.import_module(".explain.writing", kernel.__name__)


@pytest.fixture(scope="module")
def table(kernel):
    return importlib.import_module(".explain.table", kernel.__name__)


def transformer(layers: int, width: int = 16) -> dict[str, Parameter]:
    """The parameters of a small transformer, by name."""
    shapes = {
        "attn.qkv": (3 * width, width),
        "attn.proj": (width, width),
        "mlp.up": (4 * width, width),
        "norm": (width,),
    }
    named = {"wte.weight": (50, width)}
    named |= {f"blocks.{i}.{name}.weight": shape for i in range(layers) for name, shape in shapes.items()}
    return {name: Parameter(torch.zeros(shape)) for name, shape in named.items()}


def test_two_thousand_layers_are_four_lines(kernel):
    """And stay that many rows."""
    named = transformer(2000)
    explanation = kernel.route(named.items())
    assert len(explanation) == len(named) == len(list(explanation)) and [row.name for row in explanation] == list(named)
    lines = str(explanation).splitlines()[2:-1]
    assert [line.split("  ")[0] for line in lines] == [
        "wte.weight",
        *(f"blocks.{{0..1999}}.{name}.weight x 2000" for name in ("attn.qkv", "attn.proj", "mlp.up", "norm")),
    ]


CHANGES = {
    "shape": (8, 4), "branch": "adamw", "reason": "is_muon", "matrices": 2, "multipliers": (0.5, 1.0), "owner": 1,
    "kernel": "other", "lr": 0.5, "weight_decay": 0.5, "state_bytes": 5, "flops": 5.0,
}  # fmt: skip


def test_every_field_is_tested_for_agreement(table):
    assert CHANGES.keys() == set(table.Route._fields) - {"name"}


@pytest.mark.parametrize("field", CHANGES)
def test_layers_that_differ_in_anything_shown_are_lines_of_their_own(table, field):
    rows = [
        table.Route(f"layers.{i}.up", (4, 4), "muon", "matrix", 1, (1.0,), 0, "gemm", 0.1, 0.1, 4, 4.0)
        for i in range(4)
    ]
    rows[2] = rows[2]._replace(**{field: CHANGES[field]})
    lines = str(table.Explanation(rows)).splitlines()[2:4]
    assert [line.split("  ")[0] for line in lines] == ["layers.{0,1,3}.up x 3", "layers.2.up"]


def test_a_large_model_fits_a_page(kernel):
    """A table of 160 columns, whatever its products are called."""
    optimizer = kernel.Muon(transformer(24).items(), lr=0.02, second_moment="rows", equalize="rows", renormalize="rows")
    rows, lines = optimizer.explain().rows, str(optimizer.explain()).splitlines()
    assert len(lines) < 20 and max(map(len, lines)) <= 160
    numbers = {line.split()[-1] for line in lines if "  muon  " in line}
    kernels = {row.kernel for row in rows if row.branch == "muon"}
    assert {line.partition(" ")[2] for line in lines if line.partition(" ")[0] in numbers} == kernels


def test_learning_rate_and_decay_are_those_of_the_call(kernel):
    params = named_parameters()
    optimizer = kernel.Muon(params.items(), lr=torch.tensor(0.5), adamw_lr=0.25, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    before = optimizer.explain()
    take_steps(optimizer, params, [0])
    scheduler.step()
    optimizer.param_groups[0]["weight_decay"] = 0.0
    seen = {row.branch: (row.lr, row.weight_decay) for row in optimizer.explain()}
    assert seen == {"muon": (0.25, 0.0), "adamw": (0.125, 0.1)}
    assert {row.branch: (row.lr, row.weight_decay) for row in before} == {"muon": (0.5, 0.1), "adamw": (0.25, 0.1)}


@pytest.mark.parametrize("rate", [torch.tensor(0.5), torch.tensor([0.5])], ids=str)
def test_a_rate_is_shown_as_a_number_under_a_fake_mode_too(kernel, rate):
    """The mode refuses operations on real tensors."""
    with FakeTensorMode():
        (row,) = kernel.Muon([("up.weight", Parameter(torch.ones(8, 8)))], lr=rate).explain()
    assert row.lr == 0.5


def test_a_rate_is_never_fetched_from_a_device(writing):
    elsewhere = torch.zeros((), device="meta")
    assert writing.effective_lr({"lr": elsewhere, "lr_factor": 1.0}) == "tensor on meta"
    assert writing.effective_lr({"lr": elsewhere, "lr_factor": 0.5}) == "0.5 x tensor on meta"
    assert writing.effective_lr({"lr": 0.5, "lr_factor": 0.5}) == 0.25


STATES = {
    "plain": {},
    "nadamw": {"fallback": "nadamw"},
    "8 bits": {"momentum_dtype": "int8"},
    "half": {"momentum_dtype": "bfloat16"},
    "float16": {"momentum_dtype": "float16"},
    "moments": {"second_moment": "rows"},
    "halves": {"dtype": torch.bfloat16, "master_weights": "split"},
}


@pytest.mark.parametrize("case", STATES)
def test_the_state_is_as_large_as_said(kernel, case):
    options = dict(STATES[case])
    params = named_parameters(options.pop("dtype", torch.float32))
    params["frozen.weight"] = Parameter(torch.zeros(8, 8), requires_grad=False)
    optimizer = kernel.Muon(params.items(), **options)
    said = {row.name: row.state_bytes for row in optimizer.explain()}
    assert said == {name: sum(t.nbytes for t in optimizer.state.get(p, {}).values()) for name, p in params.items()}
    idle = {row.name for row in optimizer.explain() if row.branch != "muon"} | {"frozen.weight"}
    assert idle == {row.name for row in optimizer.explain() if row.flops is None}
    planned = [(name, Parameter(torch.empty_like(p, device="meta"), p.requires_grad)) for name, p in params.items()]
    rows = kernel.Muon(planned, **options).explain().rows  # of what has no state yet
    assert {row.name: row.state_bytes for row in rows} == said and rows[-1].flops is None
    assert said.pop("frozen.weight") == 0 and min(said.values()) > 0


def test_imported_momentum_is_as_large_as_said(kernel):
    """It keeps its dtype, whatever that of the parameter."""
    source = Parameter(torch.ones(8, 16))
    muon = torch.optim.Muon([source])
    source.grad = torch.ones(8, 16)
    muon.step()
    optimizer = kernel.Muon([("up.weight", Parameter(source.detach().bfloat16()))])
    kernel.import_state(optimizer, muon.state_dict())
    (row,) = optimizer.explain()
    assert row.state_bytes == sum(t.nbytes for state in optimizer.state.values() for t in state.values()) == 8 * 16 * 4


def test_a_branch_without_parameters_has_no_state(kernel):
    optimizer = kernel.Muon([("up.weight", Parameter(torch.ones(8, 16)))])
    assert "0 (0 elements) by AdamW" in str(optimizer.explain())


def test_work_is_that_of_the_standard_iteration(kernel):
    """4 m² n + 2 m³ for a wide m x n matrix at each step, or 3 m² n + m³ where half of symmetric products is saved."""
    products = kernel.kernels.products.select_products(torch.device("cpu"), torch.float32, 16, 48)
    saves = {1.0: lambda m, n: 4 * m * m * n + 2 * m**3, 2.0: lambda m, n: 3 * m * m * n + m**3}[products.gram_gain]
    params = {"tall.weight": Parameter(torch.zeros(48, 16)), "square.weight": Parameter(torch.zeros(16, 16))}
    params["vector"] = Parameter(torch.zeros(16))
    rows = kernel.Muon(params.items(), ns_steps=3, ns_coefficients="quintic", **SMALL).explain().rows
    expected = {"tall.weight": 3 * saves(16, 48), "square.weight": 3 * saves(16, 16), "vector": None}
    assert {row.name: row.flops for row in rows} == expected
    shares = re.findall(r"([0-9.]+)%", str(kernel.Muon(params.items(), **SMALL).explain()))
    # 14 to 6, or 10 to 4.
    assert [float(share) for share in shares] == ([70.0, 30.0] if products.gram_gain == 1 else [71.4, 28.6])


@pytest.mark.parametrize("has_gemm", [True, False])
@pytest.mark.parametrize("has_instructions", [True, False])
@pytest.mark.parametrize("asked", ["float32", "bfloat16", "float16"])
def test_half_precision_that_torch_multiplies_slowly_is_noted(
    kernel, measurements, monkeypatch, asked, has_instructions, has_gemm
):
    for dtype in "bf16", "fp16":
        monkeypatch.setattr(torch.ops.mkldnn, f"_is_mkldnn_{dtype}_supported", lambda: has_instructions)
    monkeypatch.setattr(kernel.kernels.native_products, "is_faster", lambda dtype: has_gemm)
    optimizer = kernel.Muon([("a", Parameter(torch.ones(8, 16))), ("b", Parameter(torch.ones(16, 8)))], ns_dtype=asked)
    notes = [note for note in optimizer.explain().notes if "in half precision" in note]
    by_torch = asked == "float16" or (asked == "bfloat16" and not has_gemm)
    assert len(notes) == (by_torch and not has_instructions)
    assert all(note.startswith("torch multiplies matrices of 2 parameters, such as a, in half") for note in notes)


def test_print_sums_bytes_and_work_over_a_line(kernel):
    explanation = kernel.Muon(transformer(3).items(), **SMALL).explain()
    lines = {line.split(" ")[0]: line.split() for line in str(explanation).splitlines()}
    cells = lines["blocks.{0..2}.mlp.up.weight"]
    assert cells[1:3] == ["x", "3"] and cells[-4:-2] == [f"{3 * 64 * 16 * 4 / 1024:.1f}", "KiB"]
    total = sum(row.flops or 0 for row in explanation)
    assert cells[-2] == f"{3 * next(row.flops for row in explanation if 'mlp.up' in row.name) / total:.1%}"


class Cells(HTMLParser):
    """The text of a table's cells and of the paragraphs below it; the tags that are open, and all attributes."""

    def __init__(self, text: str):
        super().__init__()
        self.rows, self.paragraphs, self.open, self.attributes, self.tags = [], [], [], [], set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.tags.add(tag)
        self.attributes += attributes
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "p":
            self.paragraphs.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] == "p":
            self.paragraphs[-1] += data
        else:
            self.rows[-1][-1] += data


def test_a_notebook_shows_what_is_printed(kernel):
    """With the names of products in the lines themselves."""
    explanation = kernel.Muon(transformer(3).items(), lr=0.5, **SMALL).explain()
    html, printed = Cells(explanation._repr_html_()), str(explanation).splitlines()
    assert html.open == [] and html.rows[0] == printed[0].split()
    names = dict(line.split(" ", 1) for line in printed if line.startswith("["))
    plain = [re.split(r" {2,}", line) for line in printed[2 : 1 + len(html.rows)]]
    assert html.rows[1:] == [[*row[:-1], names[row[-1]]] for row in plain]
    assert html.paragraphs == printed[1 + len(html.rows) + len(names) :]


def test_a_notebooks_table_is_readable_on_light_and_dark_and_needs_nothing_else(kernel):
    """It sets no colour of text, and backgrounds let the page's own shine through."""
    html = Cells(kernel.Muon(named_parameters().items()).explain()._repr_html_())
    assert html.tags == {"div", "table", "thead", "tbody", "tr", "th", "td", "p"}
    assert {name for name, _ in html.attributes} == {"style"}
    styles = ";".join(value for _, value in html.attributes)
    assert "url" not in styles and not re.search(r"(^|;)color:", styles)
    tints = re.findall(r"background:([^;]+)", styles)
    assert tints and all(float(re.fullmatch(r"rgba\(\d+,\d+,\d+,(.+)\)", tint)[1]) <= 0.2 for tint in tints)


def test_names_are_text_in_html(kernel):
    """In cells and in notes, such as one about what may be a stack."""
    html = kernel.route([("<b>up</b>.weight", Parameter(torch.zeros(8, 8, 12)))])._repr_html_()
    assert "<b>" not in html and html.count("&lt;b&gt;up") == 2


def test_groups_of_a_model_are_the_same_table(kernel):
    groups = kernel.groups_for(torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)))
    assert groups._repr_html_() == groups.choices._repr_html_() and "<table" in groups._repr_html_()


def test_hyperball_shows_no_decay(kernel):
    rows = kernel.Muon(named_parameters().items(), experimental_hyperball=True, weight_decay=0.1).explain().rows
    assert {row.branch: row.weight_decay for row in rows} == {"muon": None, "adamw": 0.1}
