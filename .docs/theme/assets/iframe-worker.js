// The search runs in a worker, which a page that is opened from the disk may not start: there it runs in a frame.
if (location.protocol === "file:") {
  const load = (document, source) =>
    new Promise((loaded, failed) => {
      const script = document.createElement("script")
      Object.assign(script, { src: source, onload: loaded, onerror: failed })
      document.head.append(script)
    })

  class FrameWorker extends EventTarget {
    constructor(source) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.IFrameWorker = FrameWorker
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = async (...sources) => {
        for (const each of sources) await load(inside.document, each)
      }
      this.ready = load(inside.document, new URL(source, location.href))
    }

    postMessage(data) {
      const { contentWindow } = this.frame
      this.ready.then(() => contentWindow.dispatchEvent(new contentWindow.MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }

  window.IFrameWorker = window.Worker = FrameWorker
}
