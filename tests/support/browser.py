"""Chromium without a window, driven by its own protocol (DevTools)."""

import asyncio
import base64
import contextlib
import json
import pathlib
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

PROGRAM = shutil.which('chromium')
_KEYS = {'Enter': 13, 'Escape': 27, 'ArrowRight': 39, 'ArrowLeft': 37, 'Tab': 9}
_SHIFT = 8


class Browser:
  """One page.

  Attributes:
    problems: What the console has said, and exceptions that nothing caught.
    sent: The addresses that the page has asked for.
  """

  def __init__(self, loop: asyncio.AbstractEventLoop, socket: Any):
    self._loop, self._socket, self._last = loop, socket, 0
    self.problems: list[str] = []
    self.sent: list[str] = []
    for domain in ('Page', 'Runtime', 'Log', 'Network'):
      self.call(f'{domain}.enable')

  def call(self, method: str, **params: Any) -> dict[str, Any]:
    """Returns the result of a method of the protocol."""
    self._last += 1
    message = dict(id=self._last, method=method, params=params)
    return self._loop.run_until_complete(self._answer(message))

  async def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
    await self._socket.send_str(json.dumps(message))
    while True:
      found = json.loads((await self._socket.receive(timeout=60)).data)
      if found.get('id') == message['id']:
        assert 'error' not in found, found
        return found['result']
      self._note(found['method'], found['params'])

  def _note(self, event: str, told: dict[str, Any]) -> None:
    if event == 'Runtime.exceptionThrown':
      details = told['exceptionDetails']
      self.problems.append(details.get('exception', {}).get('description') or details['text'])
    elif event == 'Runtime.consoleAPICalled':
      self.problems.append(json.dumps(told['args']))
    elif event == 'Log.entryAdded':
      self.problems.append(told['entry']['text'])
    elif event == 'Page.javascriptDialogOpening':
      self.problems.append(f'dialog: {told["message"]}')
    elif event == 'Network.requestWillBeSent':
      self.sent.append(told['request']['url'])

  def run(self, script: str) -> Any:
    """Returns the value of an expression in the page."""
    found = self.call('Runtime.evaluate', expression=script, returnByValue=True, awaitPromise=True)
    assert 'exceptionDetails' not in found, found
    return found['result'].get('value')

  def until(self, script: str, seconds: float = 60) -> Any:
    """Waits until an expression is true, and returns its value."""
    end = time.monotonic() + seconds
    while not (found := self.run(script)):
      assert time.monotonic() < end, (script, self.run('document.body.innerText'), self.problems)
      time.sleep(0.05)
    return found

  def open(self, url: str) -> None:
    self.call('Page.navigate', url=url)
    self.until('document.readyState === "complete"')

  def write(self, text: str) -> None:
    """Writes a text where the focus is."""
    self.call('Input.insertText', text=text)

  def press(self, key: str, shift: bool = False) -> None:
    more: dict[str, Any] = dict(key=key, code=key, windowsVirtualKeyCode=_KEYS[key])
    more |= dict(modifiers=_SHIFT if shift else 0)
    text = dict(text='\r') if key == 'Enter' else {}
    self.call('Input.dispatchKeyEvent', type='keyDown', **more, **text)
    self.call('Input.dispatchKeyEvent', type='keyUp', **more)

  def point(self, element: str, kind: str = 'mouseMoved') -> None:
    """Moves the pointer to the middle of an element, which an expression gives."""
    x, y = self.run(
      f'(e => {{ e.scrollIntoView({{block: "center"}}); const r = e.getClientRects()[0]; '
      f'return [r.x + r.width / 2, r.y + r.height / 2]; }})({element})'
    )
    more = {} if kind == 'mouseMoved' else dict(button='left', clickCount=1)
    self.call('Input.dispatchMouseEvent', type=kind, x=x, y=y, **more)

  def click(self, element: str) -> None:
    self.point(element, 'mousePressed')
    self.point(element, 'mouseReleased')

  def look(self, width: int, height: int = 900, dark: bool = False) -> None:
    """Sets the size of the window and the scheme of colors."""
    self.call(
      'Emulation.setDeviceMetricsOverride', width=width, height=height, deviceScaleFactor=1,
      mobile=False,
    )  # fmt: skip
    scheme = dict(name='prefers-color-scheme', value='dark' if dark else 'light')
    self.call('Emulation.setEmulatedMedia', features=[scheme])

  def picture(self) -> bytes:
    """Returns a PNG of the window."""
    return base64.b64decode(self.call('Page.captureScreenshot')['data'])


@contextlib.contextmanager
def browser(folder: pathlib.Path) -> Iterator[Browser]:
  """Starts Chromium with a profile in a folder, and ends it."""
  import aiohttp

  process = subprocess.Popen(
    [str(PROGRAM), '--headless=new', '--no-sandbox', '--disable-gpu', '--remote-debugging-port=0',
     f'--user-data-dir={folder}', '--window-size=1200,900', 'about:blank'],
    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
  )  # fmt: skip
  loop = asyncio.new_event_loop()
  try:
    told, end = folder / 'DevToolsActivePort', time.monotonic() + 60
    while not (told.exists() and '\n' in told.read_text()):
      assert process.poll() is None
      assert time.monotonic() < end
      time.sleep(0.05)
    port = told.read_text().split()[0]
    with urllib.request.urlopen(f'http://127.0.0.1:{port}/json/list', timeout=60) as response:
      page = next(each for each in json.load(response) if each['type'] == 'page')

    async def connected() -> tuple[Any, Any]:
      session = aiohttp.ClientSession()
      return session, await session.ws_connect(page['webSocketDebuggerUrl'], max_msg_size=0)

    session, socket = loop.run_until_complete(connected())
    yield Browser(loop, socket)
    loop.run_until_complete(session.close())
  finally:
    process.kill()
    process.wait()
    loop.close()
