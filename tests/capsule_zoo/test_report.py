"""The report shows the whole zoo with the records' own numbers, and a browser displays it."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from capsule_zoo.cli import main
from capsule_zoo.experiments import list_experiments
from capsule_zoo.records import flatten, read_record, write_record
from capsule_zoo.registry import WEIGHTS, list_models
from capsule_zoo.report.gallery import Gallery, gather
from capsule_zoo.report.page import render, write_page
from capsule_zoo.report.published import STATES, read_published

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
RECORDS = [p.relative_to(RESULTS).with_suffix("").as_posix() for p in RESULTS.glob("*/*.json")]
MEGABYTES = 5.6
PHONE = 390  # pixels
VOID = {"meta", "link", "img", "br"}


class Page(HTMLParser):
    """The contents of a page; raises AssertionError if its elements do not nest."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.text = path.read_text()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.feed(self.text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, {key: value or "" for key, value in attributes}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> at {self.getpos()}"

    def attributes(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.elements if name in attributes]

    @property
    def numbers(self) -> dict[str, float]:
        """Return every shown metric as `record:metric`."""
        cells = [attributes for _, attributes in self.elements if "data-metric" in attributes]
        return {cell["data-metric"]: float(cell["data-value"]) for cell in cells}


@pytest.fixture(scope="module")
def gallery() -> Gallery:
    """Return the contents of the report on the repository's own records."""
    return gather(RESULTS)


@pytest.fixture(scope="module")
def page(gallery, tmp_path_factory) -> Page:
    """Return the report on the repository's own records."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render(gallery))
    return Page(path)


def test_everything_that_there_is_appears(page):
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    assert {*list_experiments(), *RECORDS} <= set(ids)
    assert {f"weights-{path.stem}" for path in WEIGHTS.glob("*.safetensors")} <= set(ids)
    for name in list_models():
        assert f'create("{name}")' in page.text.replace("&#34;", '"'), name


def test_every_number_is_that_of_its_record(page):
    stated = {
        f"{name}:{metric}": found["value"]
        for name in RECORDS
        for metric, found in read_record(name, RESULTS)["metrics"].items()
    }
    assert page.numbers == stated and stated


def test_every_published_number_appears(page):
    states = "|".join(STATES).replace("not counted", "not comparable")
    assert len(re.findall(f" published .+? [(](?:{states})", page.text)) == len(read_published())


def test_what_has_no_record_is_shown_with_its_command(page):
    words = re.sub(r"<[^>]+>", " ", page.text)
    for name in set(list_experiments()) - set(RECORDS):
        assert re.search(rf"not measured yet\s+capsule-zoo reproduce {name}\s", words), name


def test_the_page_is_one_light_file(page):
    assert page.path.stat().st_size < MEGABYTES * 1e6
    for tag, attributes in page.elements:
        for name in ("src", "srcset", "data", "href"):
            address = attributes.get(name, "data:")
            assert address.startswith("data:") or (tag == "a" and name == "href"), address
        assert tag != "img" or attributes["alt"]
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", page.text)


def test_captions_are_words(page):
    captions = re.findall(r"<figcaption>(.*)</figcaption>", page.text)
    assert len(captions) > 50
    for caption in captions:
        assert re.fullmatch(r"[A-Z0-9].* .*[A-Za-z0-9]\.", caption), caption
        assert not re.search(r"[`_/]|(?<![\d,])0\d|minutes\)", caption), caption


def test_links_within_the_page_lead_somewhere(page):
    inside = [link[1:] for link in page.attributes("href") if link.startswith("#")]
    assert set(inside) <= set(page.attributes("id")) and inside


def test_it_says_nothing_of_the_machine_it_was_made_on(page):
    assert str(ROOT) not in page.text and str(page.path.parent) not in page.text


def some_record(folder: Path, name: str, **metrics: tuple[float, float | None]) -> None:
    found = {key: {"value": value, "se": se, "n": 7} for key, (value, se) in metrics.items()}
    write_record(name, found, command=f"make {name}", seed=3, data="d", seconds=90, folder=folder)


def test_records_that_nobody_has_heard_of_show_up(tmp_path):
    folder = tmp_path / "results"
    some_record(folder, "vae/dreams", elbo=(-98.7654, 0.4321), depth=(3.0, None))
    some_record(folder, "unheard-of/thing", share=(0.123456, 0.00789))
    raced = {"ratio": {"snail": (31.4159, 0.27, 7)}, "seconds": {"snail": (9.0, None, 7)}}
    metrics, tables = flatten(raced)
    rest = dict(command="race", seed=3, data="d", seconds=90, folder=folder, about="nothing")
    write_record("benchmarks/race", metrics, tables=tables, **rest)
    for name in ("vae/dreams", "vae/dreams_red", "unheard-of/thing"):
        Image.new("RGB", (1500, 300), "red" if "red" in name else "blue").save(
            folder / f"{name}.png"
        )
    page = Page(write_page(tmp_path / "zoo.html", folder))
    assert {"vae/dreams", "unheard-of/thing", "benchmarks/race"} <= set(page.attributes("id"))
    assert page.numbers["vae/dreams:elbo"] == -98.7654
    assert page.numbers["benchmarks/race:ratio_snail"] == 31.4159
    words = re.sub(r"<[^>]+>", "", page.text)
    for shown in (
        "\N{MINUS SIGN}98.77 ± 0.43",
        "0.1235 ± 0.0079",
        "31.42 ± 0.27",
        "make vae/dreams",
    ):
        assert shown in words
    pictures = [attributes for tag, attributes in page.elements if tag == "img"]
    assert [(p["width"], p["height"]) for p in pictures] == [
        ("900", "180")
    ] * 4  # the first opens the page too
    assert "not measured yet" in words  # all the rest


def test_a_folder_without_records_is_refused_in_words(tmp_path, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["report", "--results", str(tmp_path / "none"), "--out", str(tmp_path / "zoo.html")])
    assert stopped.value.code == 2 and not (tmp_path / "zoo.html").exists()
    assert "there are no records in" in capsys.readouterr().err


def test_a_damaged_record_is_refused_by_name(tmp_path):
    some_record(tmp_path, "vae/dreams", elbo=(1.0, 0.1))
    (tmp_path / "vae" / "broken.json").write_text(json.dumps({"experiment": "vae/broken"}))
    with pytest.raises(ValueError, match=r"broken\.json is not a record"):
        write_page(tmp_path / "zoo.html", tmp_path)


def test_the_registration_says_what_opens_a_section(gallery):
    families = {family.anchor: family for family in gallery.families}
    part_whole = families["part-whole"]
    assert part_whole.findings[0].name == "part-whole/guides"
    assert part_whole.lead.words.startswith("Parses. Learn MNIST without labels")
    assert families["recurrent-capsules"].lead.words.startswith("Show the canvas after")
    raced = {race.name for race in part_whole.races}
    assert raced == {f"benchmarks/{name}" for name in ("compiled", "part_whole_step", "render")}


def visit(browser, page: Page, width: int, place: str = "") -> None:
    browser.get("about:blank")
    browser.get_log("browser")  # what an earlier page said
    metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.path.as_uri() + place)


def unfold(browser) -> None:
    browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true })")


def test_a_browser_finds_no_fault_with_it(browser, page):
    visit(browser, page, 1280)
    unfold(browser)
    assert browser.get_log("browser") == []
    resources = "return performance.getEntriesByType('resource').map(entry => entry.name)"
    assert [r for r in browser.execute_script(resources) if not r.startswith("data:")] == []


def test_every_image_loads(browser, page):
    visit(browser, page, 1280)
    unfold(browser)
    widths = browser.execute_async_script("""
        const done = arguments[0], images = [...document.images];
        Promise.allSettled(images.map(image => image.decode()))
          .then(() => done(images.map(image => [image.naturalWidth, image.width])));""")
    sizes = [attributes["width"] for tag, attributes in page.elements if tag == "img"]
    assert sizes and [natural for natural, _ in widths] == list(map(int, sizes))
    assert all(shown > 0 for _, shown in widths)


@pytest.mark.parametrize("width", [PHONE, 800, 1280])
def test_the_page_itself_never_scrolls_sideways(browser, page, width):
    visit(browser, page, width)
    unfold(browser)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width


def test_every_table_sorts_by_every_column(browser, page):
    visit(browser, page, 1280)
    unfold(browser)
    tables = browser.execute_script("""
        return [...document.querySelectorAll("table.sortable")].map(table => {
          const text = cell => cell.textContent.trim();
          const value = cell => text(cell) && (cell.dataset.value ?? text(cell));
          const read = i => [...table.tBodies[0].rows].map(row => value(row.cells[i]));
          const click = head => head.querySelector("button").click();
          return [...table.tHead.rows[0].cells].map((head, i) => {
            const rows = () => table.tBodies[0].rows.length, before = rows();
            const seen = [0, 1].map(() => { click(head); return [head.ariaSort, read(i)]; });
            return [head.className, before === rows(), seen];
          });
        });""")
    assert tables
    for kind, complete, seen in (column for table in tables for column in table):
        assert complete and {order for order, _ in seen} == {"ascending", "descending"}
        for order, values in seen:
            there = [value for value in values if value]
            assert values == there + [""] * (len(values) - len(there))  # what is missing comes last
            if kind == "number":
                numbers = list(map(float, there))
                assert numbers == sorted(numbers, reverse=order == "descending")


def test_a_reader_sorts_by_a_click_and_follows_a_link_to_an_experiment(browser, page):
    visit(browser, page, 1280)
    table = browser.find_element("css selector", "#overview table")
    first = lambda: table.find_element("css selector", "tbody th").text  # noqa: E731
    names = [cell.text for cell in table.find_elements("css selector", "tbody th")]
    button = table.find_element("css selector", "thead button")
    browser.execute_script(
        "arguments[0].scrollIntoView({behavior: 'instant', block: 'center'})", button
    )
    button.click()
    assert first() == min(names, key=str.casefold)
    button.click()
    assert first() == max(names, key=str.casefold)
    measured = next(
        name for name in RECORDS if f'<details class="experiment" id="{name}"' in page.text
    )
    visit(browser, page, 1280, f"#{measured}")
    opened = "return document.getElementById(arguments[0]).open"
    assert browser.execute_script(opened, measured) is True
