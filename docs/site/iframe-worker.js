// Browsers give a page that is opened from a folder no workers. The search's worker runs in a hidden frame there.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inner = frame.contentWindow;
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inner.document.createElement("script");
      // messages that come before the script has loaded wait
      const loaded = new Promise((resolve) => (script.onload = resolve));
      this.postMessage = (data) =>
        loaded.then(() => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
      script.src = new URL(address, location.href);
      inner.document.head.append(script);
    }
  };
}
