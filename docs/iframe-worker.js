// Browsers start no worker in a page that was opened from a folder. The search worker then runs in a hidden frame,
// which provides the two functions that it uses: postMessage and importScripts. English needs no imported script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<body><script>
        window.postMessage = data => parent.postMessage(data, "*");
        window.importScripts = () => Promise.resolve();
      </script><script src="${url}"></script></body>`;
      this.ready = new Promise(resolve => frame.addEventListener("load", resolve));
      this.frame = frame;
      addEventListener("message", event => {
        if (event.source === frame.contentWindow) {
          this.dispatchEvent(new MessageEvent("message", {data: event.data}));
        }
      });
      document.body.append(frame);
    }

    async postMessage(data) {
      await this.ready;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data: structuredClone(data)}));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
