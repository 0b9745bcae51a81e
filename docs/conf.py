"""The site of these pages: `make docs` builds it into build/site."""

import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import paxlite
from paxlite.tools import attributes, listings
from paxlite.weights.commands import families

project = 'paxlite'
release = paxlite.__version__
extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon', 'sphinx_copybutton']
source_suffix = {'.md': 'markdown'}
html_theme = 'furo'
html_title = f'paxlite {release}'
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_static_path = ['site']
html_css_files = ['pages.css']
html_js_files = ['search_of_files.js']
myst_heading_anchors = 3
myst_enable_extensions = ['attrs_block']
suppress_warnings = ['misc.highlighting_failure', 'myst.xref_missing']
autodoc_typehints = 'description'
autodoc_typehints_description_target = 'documented'
autodoc_member_order = 'bysource'
autodoc_default_options = {'members': True, 'show-inheritance': False}
napoleon_google_docstring = True
copybutton_exclude = '.linenos, .gp'


def write_llms_txt(app, exception) -> None:
  """Writes llms.txt, which lists the pages with their first sentences (llmstxt.org)."""
  if exception or app.builder.name != 'html':
    return
  lines = ['# paxlite', '', '> Trains language models in JAX.']
  toctree = re.compile(r'```\{toctree\}\n:caption: (.+)\n:hidden:\n\n([^`]*)```')
  folder = pathlib.Path(app.srcdir)
  for caption, names in toctree.findall((folder / 'index.md').read_text('utf-8')):
    lines += ['', f'## {caption}', '']
    for name in names.split():
      title, text = first_sentence((folder / f'{name}.md').read_text('utf-8'))
      lines.append(f'- [{title}]({name}.html): {text}')
  (pathlib.Path(app.outdir) / 'llms.txt').write_text('\n'.join(lines) + '\n')


def write_pages_js(app, exception) -> None:
  """Writes the text of all pages as a script, for the search of a site that is opened as files."""
  if exception or app.builder.name != 'html':
    return
  folder = pathlib.Path(app.outdir)
  main = re.compile(r'<article role="main".*?</article>', re.DOTALL)
  pages = {
    str(path.relative_to(folder)): found.group()
    for path in sorted(folder.rglob('*.html'))
    if (found := main.search(path.read_text('utf-8')))
  }
  (folder / '_static' / 'pages.js').write_text(f'window.PAGES = {json.dumps(pages)}\n')


def wrap_commands(app, page, template, context, doctree) -> None:
  """Makes each command of a block an element, which pages.css indents where it wraps."""
  block = re.compile(
    r'(<div class="highlight-sh [^>]*><div class="highlight"><pre>)(.*?)(</pre>)', re.DOTALL
  )

  def elements(found) -> str:
    lines = re.sub(r'(?<![\w-])--\w+', r'<span class="flag">\g<0></span>', found[2]).split('\n')
    spans = ''
    for line in lines[:-1]:
      whole = line.count('<span') == line.count('</span>')
      spans += f'<span class="command">{line}\n</span>' if whole else f'{line}\n'
    return found[1] + spans + lines[-1] + found[3]

  if 'body' in context:
    context['body'] = block.sub(elements, context['body'])


def first_sentence(page: str) -> tuple[str, str]:
  """Returns the title of a page, and the first sentence below it without links."""
  title, _, rest = page.removeprefix('# ').partition('\n')
  rest = re.sub(r'^(```|~~~).*?^\1', '', rest, flags=re.DOTALL | re.MULTILINE)
  is_text = lambda block: block[:1] not in '#!:|<' and not block.startswith('- ')
  text = next((b for b in rest.split('\n\n') if b.strip() and is_text(b.strip())), '')
  plain = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', ' '.join(text.split()))
  return title, re.split(r'(?<=[.:]) (?=[A-Z`])', plain)[0].rstrip(':')


def attributes_of_families() -> str:
  stated = pathlib.Path(__file__).with_name('attributes.md').read_text('utf-8')
  return attributes.tables([r for r in listings.attributes() if f'`{r["name"]}`' not in stated])


# What the pages leave out, so that a new family changes no page.
TABLES = {
  '<!-- families -->': families.table,
  '<!-- keys of families -->': families.keys_table,
  '<!-- attributes of families -->': attributes_of_families,
}


def with_families(app, page, source) -> None:
  """Puts the tables of all families where a page has their marks."""
  for mark, table in TABLES.items():
    if mark in source[0]:
      source[0] = source[0].replace(mark, table())


def setup(app) -> None:
  app.connect('source-read', with_families)
  app.connect('html-page-context', wrap_commands)
  app.connect('build-finished', write_llms_txt)
  app.connect('build-finished', write_pages_js)
