// Sphinx's search fetches each page that it found, for its excerpt. A browser refuses that for
// files, so there the pages come from pages.js, which is read when the first of them is needed.
if (location.protocol === 'file:') {
  let loaded
  const load = () =>
    new Promise((resolve, reject) => {
      const script = document.createElement('script')
      script.onload = () => resolve(window.PAGES)
      script.onerror = reject
      script.src = document.documentElement.dataset.content_root + '_static/pages.js'
      document.head.append(script)
    })
  window.fetch = async (address) => {
    const pages = await (loaded ??= load())
    const root = new URL(document.documentElement.dataset.content_root, location.href).pathname
    const name = new URL(address, location.href).pathname.slice(root.length)
    return new Response(pages[name] ?? '')
  }
}
