/* Search without a server: a browser starts no worker from a file, so on `file:` pages
   a worker is a hidden frame that runs the same script and passes the same messages. */
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.appendChild(frame)
      this.inside = frame.contentWindow
      const send = (target, data) =>
        target.dispatchEvent(new MessageEvent("message", { data }))
      this.inside.postMessage = (data) => send(this, data)
      this.ready = new Promise((resolve) => {
        const script = frame.contentDocument.createElement("script")
        script.src = url
        script.onload = resolve
        frame.contentDocument.documentElement.appendChild(script)
      })
      this.send = send
    }
    postMessage(data) {
      this.ready.then(() => this.send(this.inside, data))
    }
    terminate() {
      this.inside.frameElement.remove()
    }
  }
