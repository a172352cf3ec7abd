"""Settings of Sphinx: pages are Markdown (MyST); stories and reference come from docstrings."""

import shutil
import sys
from pathlib import Path

import capsule_zoo

HERE = Path(__file__).resolve().parent

project = "Capsule Zoo"
version = release = capsule_zoo.__version__
copyright = author = "the authors of Capsule Zoo"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "myst_nb"]

html_theme = "furo"
html_title = f"Capsule Zoo {version}"
html_copy_source = html_show_copyright = html_show_sphinx = False
html_static_path = ["static"]
html_css_files = ["zoo.css"]

autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False  # torch's and Pyro's docstrings would outnumber ours
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
add_module_names = False
default_role = "code"
python_maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
# Sphinx reads only pictures from outside this folder, so notebooks are copied into it.
shutil.rmtree(HERE / "notebooks", ignore_errors=True)
shutil.copytree(HERE.parent / "notebooks", HERE / "notebooks", ignore=shutil.ignore_patterns(".*"))
nb_execution_mode = "off"  # notebooks are stored with their outputs; the tests run them


def setup(app):
    """Register the steps that write and fill in pages and that translate docstrings."""
    sys.path.insert(0, str(HERE))
    import docstrings
    import pages

    pages.write_others(HERE / pages.OTHERS)
    pages.write_diagrams(HERE / pages.DIAGRAMS)
    app.connect("source-read", pages.fill_source)
    app.connect("autodoc-process-docstring", docstrings.translate, priority=400)  # napoleon: 500
    app.connect("autodoc-before-process-signature", docstrings.resolve_hints)
    app.connect("autodoc-skip-member", docstrings.skip_tuple_fields)
    app.add_lexer("story", docstrings.StoryLexer)
