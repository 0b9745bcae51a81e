"""The site of these pages: `make docs` builds it into build/site."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import paxlite

project = 'paxlite'
release = paxlite.__version__
extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'sphinx_copybutton']
source_suffix = {'.md': 'markdown'}
html_theme = 'furo'
html_title = f'paxlite {release}'
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
myst_heading_anchors = 3
myst_enable_extensions = ['attrs_block']
suppress_warnings = ['misc.highlighting_failure', 'myst.xref_missing']
autodoc_typehints = 'description'
autodoc_typehints_description_target = 'documented'
autodoc_member_order = 'bysource'
autodoc_default_options = {'members': True, 'show-inheritance': False}
napoleon_google_docstring = True
copybutton_exclude = '.linenos, .gp'
