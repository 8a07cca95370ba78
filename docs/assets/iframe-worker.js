/* Search without a server: browsers give no worker to a page that is opened from a folder, so a hidden frame runs
   the worker's script instead. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      const inner = (this.inner = frame.contentWindow)
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inner.document.createElement("script")
      script.src = new URL(url, location.href)
      this.ready = new Promise(resolve => script.addEventListener("load", resolve))
      inner.document.body.appendChild(script)
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
  window.Worker = window.IFrameWorker
}
