// A card per device, and the bar of the whole node above them.

class DeviceCard {
  constructor(uuid) {
    this.uuid = uuid;
    this.title = h("h3");
    this.free = h("span", { class: "free-space" });
    this.allocatable = h("span", { title: "free, and idle cache" });
    this.model = h("p", { class: "faint model" });
    this.error = h("p", { class: "error" });
    this.bar = new LedgerBar();
    this.amounts = new LedgerValues(false);
    this.chart = new Chart();
    this.button = h("button", { type: "button", class: "act", "aria-describedby": "access" });
    this.button.addEventListener("click", () => clearing.open({ uuid: this.uuid }, this.title.textContent));
    this.known = h("div", { class: "known" }, this.bar.element, this.amounts.element, this.chart.element, this.button);
    this.element = h("li", { class: "device" }, h("div", { class: "head" }, this.title, h("p", {}, this.free, " ", this.allocatable)), this.model, this.error, this.known);
  }

  update(device, view) {
    const { memory, ledger } = device;
    setText(this.title, gpuName(device.gpu, device.uuid));
    const facts = [device.name, memory === null ? "" : bytes(memory.total_bytes)];
    if (!device.name.includes(device.mig_profile)) facts.push(`MIG ${device.mig_profile}`); // the driver's name may include it
    if (device.utilization_ratio !== null) facts.push(`utilization ${percent(device.utilization_ratio)}`);
    if (memory?.of_host) facts.push("host memory");
    setText(this.model, facts.filter(Boolean).join(" · "));
    const unread = device.up ? "The driver does not report its memory." : device.error;
    setText(this.error, ledger === null ? unread : "");
    setHidden(this.error, ledger !== null);
    setHidden(this.known, ledger === null);
    const allocatable = allocatableInWords(device.allocatable_bytes);
    setText(this.free, ledger === null ? "unknown" : `${bytes(ledger.free)} free${allocatable && ","}`);
    setText(this.allocatable, allocatable);
    const level = ledger === null ? "down" : levelOf(pressureOf(ledger, memory.total_bytes));
    setAttribute(this.element, "data-level", level);
    if (ledger === null) return;
    this.bar.update(ledger, memory.total_bytes);
    this.amounts.update(ledger);
    this.chart.update(view.history, device.uuid, memory.total_bytes, view.moment.clock_seconds);
    const reporting = view.reports(device.uuid);
    setHidden(this.button, !reporting);
    if (reporting) setText(this.button, `Clear ${this.title.textContent}…`);
  }
}

function allocatableInWords(size) {
  return size === null ? "" : `${bytes(size)} allocatable`;
}

function levelOf(pressure) {
  return pressure > FULL ? "critical" : pressure > NEARLY_FULL ? "warning" : "ok";
}

class Devices {
  constructor() {
    this.cards = new Map();
    this.bar = new LedgerBar();
    this.amounts = new LedgerValues(true);
    this.sum = h("p", { class: "sum" });
    $("node").append(this.sum, this.bar.element, this.amounts.element);
  }

  update(view) {
    const cards = view.devices.map((device, i) => {
      const key = device.uuid || `unnamed ${device.gpu || i}`;
      let card = this.cards.get(key);
      if (card === undefined) {
        card = new DeviceCard(device.uuid);
        this.cards.set(key, card);
      }
      card.update(device, view);
      return [key, card];
    });
    const present = new Set(cards.map(([key]) => key));
    for (const key of this.cards.keys()) if (!present.has(key)) this.cards.delete(key);
    arrange($("devices"), cards.map(([, card]) => card.element));
    const none = view.nvml.up ? "The driver lists no device." : "The driver does not answer, so the devices are unknown.";
    setText($("no-devices"), none);
    setHidden($("no-devices"), cards.length > 0);
    this.updateNode(view);
  }

  updateNode(view) {
    const known = view.devices.filter((device) => device.ledger !== null);
    const ledger = sumOfLedgers(known.map((device) => device.ledger));
    const total = known.reduce((all, device) => all + device.memory.total_bytes, 0);
    setHidden($("node").parentElement, known.length === 0);
    if (known.length === 0) return;
    const devices = known.length === 1 ? "1 device" : `${known.length} devices`;
    const left = view.devices.length - known.length;
    const without = left > 0 ? `, without ${left} that cannot be read` : "";
    const allocatable = allocatableInWords(sumOfKnown(known.map((device) => device.allocatable_bytes)));
    const space = [`${bytes(ledger.free)} free`, allocatable].filter(Boolean).join(", ");
    setText(this.sum, `${bytes(total)} on ${devices}${without}; ${space}`);
    this.bar.update(ledger, total);
    this.amounts.update(ledger);
  }
}
