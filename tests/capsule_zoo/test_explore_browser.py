"""The explorer in a real browser, headless: sliders, drags, drops and files do what they should.

Slow, and skipped without Voila or a browser. Screenshots are left in the test's folder.
"""

import base64
import io
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from terminal import PATIENCE, run

from capsule_zoo.explore.explorer import Explorer
from capsule_zoo.registry import create, save_entry, small_settings

pytest.importorskip("voila")
webdriver = pytest.importorskip("selenium.webdriver")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]
PIXELS = """
    const image = document.querySelector(`img[alt="${arguments[0]}"]`);
    if (!image || !image.complete || !image.naturalWidth) return null;
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
    canvas.getContext("2d").drawImage(image, 0, 0);
    return canvas.toDataURL("image/png");
"""
DROP = """
    const bytes = Uint8Array.from(atob(arguments[0]), (c) => c.charCodeAt(0));
    const carried = new DataTransfer();
    carried.items.add(new File([bytes], "dropped.png", { type: "image/png" }));
    const event = new DragEvent("drop", { dataTransfer: carried, bubbles: true, cancelable: true });
    document.querySelector('img[alt="image"]').dispatchEvent(event);
"""

# the button's own input is in no document, where a driver could reach it
REVEAL = """
    HTMLInputElement.prototype.click = function () { document.body.append(this); };
    document.querySelector(".jupyter-button.widget-upload, .widget-upload").click();
"""


class Page:
    """A browser that shows the explorer's page."""

    def __init__(self, driver, folder: Path):
        self.driver = driver
        self.folder = folder

    def picture(self, name: str) -> np.ndarray | None:
        """Return the pixels (H, W, 3) of the picture with this label."""
        url = self.driver.execute_script(PIXELS, name)
        if url is None:
            return None
        png = base64.b64decode(url.partition(",")[2])
        return np.array(Image.open(io.BytesIO(png)).convert("RGB"))

    def wait(self, condition, description: str):
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if (value := condition()) is not None and value is not False:
                return value
            time.sleep(0.3)
        self.shoot("waiting")
        pytest.fail(f"waited in vain for {description}; see {self.folder}")

    def changed(self, name: str, before: np.ndarray) -> np.ndarray:
        """Return the picture once it differs from the picture `before`."""

        def different():
            now = self.picture(name)
            return now if now is not None and not np.array_equal(now, before) else None

        return self.wait(different, f"another picture of the {name}")

    def find(self, selector: str):
        return self.driver.find_element("css selector", selector)

    def slider(self, name: str):
        xpath = f'//label[text()="{name}"]/..'
        return self.driver.find_element("xpath", xpath)

    def shoot(self, name: str) -> None:
        self.driver.save_screenshot(str(self.folder / f"{name}.png"))


@pytest.fixture
def trained(tmp_path, monkeypatch) -> Path:
    """Return a run folder of a small entry whose templates can be seen."""
    monkeypatch.chdir(tmp_path)
    entry = create("part-whole", **small_settings("part-whole"))
    torch.nn.init.constant_(entry.model.template_logits, 3.0)
    save_entry(entry, tmp_path / "run", data="digits")
    return tmp_path / "run"


@pytest.fixture
def page(trained, tmp_path, browser):
    assert run("explore", "run", "--no-open") == 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "voila", "explore-run.ipynb", "--no-browser", f"--port={port}"]
    log = (tmp_path / "voila.log").open("w")
    server = subprocess.Popen([*command, "--Voila.ip=127.0.0.1"], stdout=log, stderr=log)
    browser.set_window_size(1100, 900)
    try:
        address = f"http://127.0.0.1:{port}/"
        opened_page = Page(browser, tmp_path)
        opened_page.wait(lambda: answers(f"{address}voila/static/favicon.ico"), "the server")
        browser.get(address)
        opened_page.wait(lambda: opened_page.picture("parts"), "the pictures")
        yield opened_page
    finally:
        server.terminate()
        server.wait(PATIENCE)
        log.close()


def answers(address: str) -> bool:
    try:
        urllib.request.urlopen(address, timeout=PATIENCE).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def test_a_person_can_explore(page, trained, tmp_path):
    keys, actions = webdriver.Keys, webdriver.ActionChains
    before = page.picture("model")
    page.shoot("before")

    slider = page.slider("x")
    handle = slider.find_element("css selector", ".noUi-handle")
    handle.send_keys(keys.ARROW_RIGHT * 3 + keys.PAGE_UP * 2)
    page.changed("model", before)
    page.shoot("after_slider")
    # once it has settled, the picture is the one that Python paints for the number on the page
    explorer = Explorer.of(str(trained))

    def as_python_paints() -> bool:
        number = slider.find_element("css selector", ".widget-readout").text
        explorer.sliders["x"].value = float(number.replace("\N{MINUS SIGN}", "-"))
        expected = np.array(Image.open(io.BytesIO(explorer.painted.png)).convert("RGB"))
        return np.abs(page.picture("model").astype(int) - expected).max() <= 2

    page.wait(as_python_paints, "the picture that Python paints")

    picture = page.find('img[alt="model"]')
    moved = page.picture("model")
    actions(page.driver).move_to_element(picture).click_and_hold().move_by_offset(
        40, 25
    ).release().perform()
    page.changed("model", moved)
    page.shoot("after_drag")

    pixels = page.picture("image")
    image = Image.fromarray(np.tril(np.full((40, 40), 255, np.uint8)))
    image.save(tmp_path / "chosen.png")
    content = base64.b64encode((tmp_path / "chosen.png").read_bytes()).decode()
    page.driver.execute_script(DROP, content)
    dropped = page.changed("image", pixels)
    page.wait(lambda: "loaded dropped.png" in page.find("body").text, "what was inferred")
    page.shoot("after_drop")

    page.find('input[type="checkbox"]').click()
    page.changed("image", dropped)
    page.shoot("after_inverting")
    page.driver.execute_script(REVEAL)
    page.find('input[type="file"]').send_keys(os.fspath(tmp_path / "chosen.png"))
    page.wait(lambda: "loaded chosen.png" in page.find("body").text, "what was chosen")
    page.shoot("after_file")

    entries = page.driver.get_log("browser")  # Voila itself asks a server far away for its fonts
    assert not [e for e in entries if e["level"] == "SEVERE" and e["source"] != "network"], entries
