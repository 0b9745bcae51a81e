"""The chat page: one file, which may load and run nothing else."""

import base64
import hashlib
import pathlib
import re

CONTENT = (pathlib.Path(__file__).parent / 'page.html').read_bytes()


def _hashes(tag: str) -> str:
  """Returns the hashes of what the page has within a tag, as a Content-Security-Policy has them."""
  parts = re.findall(rf'<{tag}>(.*?)</{tag}>'.encode(), CONTENT, re.DOTALL)
  digests = (base64.b64encode(hashlib.sha256(part).digest()).decode() for part in parts)
  return ' '.join(f"'sha256-{digest}'" for digest in digests)


# Trusted types: a browser that knows them refuses to read any text as HTML
_POLICY = (
  "default-src 'none'", f'script-src {_hashes("script")}', f'style-src {_hashes("style")}',
  "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
  "require-trusted-types-for 'script'", "trusted-types 'none'",
)  # fmt: skip
HEADERS = {
  'content-type': 'text/html; charset=utf-8', 'content-security-policy': '; '.join(_POLICY),
  'x-content-type-options': 'nosniff', 'referrer-policy': 'same-origin',
  'cache-control': 'no-cache',
}  # fmt: skip
