"""Fetch 857 pictures of things, 64x64 pixels with transparency, into a folder.

    python tools/emoji.py FOLDER

They are the emoji of five categories of Twemoji (animals, food, activities, travel and objects) in
the npm package emoji-datasource-twitter, which `npm` fetches (60 MB). Their art is by Twitter and
other contributors, is licensed under CC-BY 4.0, and is no part of this repository. FOLDER gets a
file `<name>.png` of each, and `SOURCE.txt`, which names the source.
"""

import argparse
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path

PACKAGE, VERSION = "emoji-datasource-twitter", "16.0.0"
CATEGORIES = (*("Animals & Nature", "Food & Drink", "Activities", "Travel & Places", "Objects"),)
SOURCE = f"""Twemoji, from the npm package {PACKAGE} {VERSION}.
Copyright Twitter, Inc and other contributors; the pictures are licensed under CC-BY 4.0.
"""


def fetch_package(folder: Path) -> Path:
    """Fetch the package by npm into a folder, and return the path of its archive.

    Raises:
        SystemExit: npm is not installed, or cannot fetch it.
    """
    wanted = f"{PACKAGE}@{VERSION}"
    try:
        run = ["npm", "pack", wanted, "--loglevel=error"]
        done = subprocess.run(run, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        raise SystemExit(f"npm is not installed, which fetches {wanted}; install Node.js") from None
    archives = list(folder.glob("*.tgz"))
    if done.returncode or not archives:
        reason = done.stderr.strip().partition("\n")[0] or f"it ended with {done.returncode}"
        raise SystemExit(
            f"npm cannot fetch {wanted} ({reason}); connect to the network, or set npm's registry "
            "to one that can be reached"
        )
    return archives[0]


def write_pictures(archive: Path, out: Path) -> int:
    """Write the pictures of the categories of an archive into a folder; return their number."""
    out.mkdir(parents=True, exist_ok=True)
    number = 0
    with tarfile.open(archive) as package:
        listing = package.extractfile("package/emoji.json")
        assert listing is not None
        for emoji in json.load(listing):
            if emoji["category"] in CATEGORIES and emoji["has_img_twitter"]:
                picture = package.extractfile(f"package/img/twitter/64/{emoji['image']}")
                assert picture is not None
                (out / f"{emoji['short_name']}.png").write_bytes(picture.read())
                number += 1
    (out / "SOURCE.txt").write_text(SOURCE)
    return number


def main(arguments: list[str] | None = None) -> None:
    """Fetch the pictures, and print how many there are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder to write into")
    out = parser.parse_args(arguments).folder
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SystemExit(f"{out} exists and is not an empty folder; name a new one")
    with tempfile.TemporaryDirectory() as folder:
        number = write_pictures(fetch_package(Path(folder)), out)
    print(f"{number} pictures written to {out}; {SOURCE.splitlines()[1]}")


if __name__ == "__main__":
    main()
