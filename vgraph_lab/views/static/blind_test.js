// The blind test. The browser gets waveforms under letters and never learns which condition they are until the test is over.
import { AudioEngine } from "./audio_engine.js";
import { clock, fit, followPointer, make } from "./audio_canvas.js";

const WORDS = ["bad", "poor", "fair", "good", "excellent"]; // the scale of ITU-R BS.1534, in fifths

class BlindSession {
  constructor(model) {
    this.model = model;
    this.views = new Set();
    this.heard = new Set();
    this.message = "";
    this.engine = new AudioEngine({
      sampleRate: model.get("_sample_rate"),
      gain: model.get("_gain"),
      onChange: () => this.changed(),
      onBlocked: () => this.say("The browser starts sound only after a click or a key here. Press Play."),
      onFailed: (error) => this.say(`This browser cannot play this sample rate: ${error.message}`),
    });
    this.listeners = {
      "msg:custom": (content, buffers) => this.receive(content, buffers),
      "change:_page": () => this.views.size && this.open(),
    };
    for (const [event, listener] of Object.entries(this.listeners)) model.on(event, listener);
  }

  dispose() {
    for (const [event, listener] of Object.entries(this.listeners)) this.model.off(event, listener);
    this.engine.close();
  }

  addView(view) {
    this.views.add(view);
    if (!this.isReady) this.open();
    return () => {
      this.views.delete(view);
      if (!this.views.size) this.engine.close();
    };
  }

  get page() {
    return this.model.get("_page");
  }

  get result() {
    return this.page.result; // there when the last answer was given
  }

  get isReady() {
    return this.engine.clip?.name === this.page.number && !this.result;
  }

  say(message) {
    this.message = message;
    this.changed();
  }

  changed() {
    const { engine } = this;
    if (engine.isPlaying && this.isReady) this.heard.add(this.page.labels[engine.chosen.track]);
    this.views.forEach((view) => view.refresh());
  }

  open() {
    const { engine, page } = this;
    engine.pause();
    this.heard.clear();
    this.isSent = false;
    this.message = "";
    if (this.result) return this.changed();
    this.tracks = page.labels.map(() => new Float32Array(page.length));
    this.received = 0;
    this.model.send({ kind: "fetch", number: page.number });
    this.changed();
  }

  receive(content, buffers) {
    const { page } = this;
    if (content.kind === "refused") {
      this.isSent = false;
      return this.say(content.message);
    }
    if (content.kind !== "piece" || content.number !== page.number || this.isReady) return;
    const bytes = buffers[0], piece = new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength));
    this.tracks[content.track].set(piece, content.offset);
    this.received += piece.length;
    if (this.received < page.length * page.labels.length) return;
    this.engine.chosen = { track: 0, difference: false };
    this.since = performance.now();
    this.engine.load({ name: page.number, tracks: this.tracks });
  }

  listen(track) {
    if (!this.isReady) return;
    this.engine.select(track);
    if (!this.engine.isPlaying) this.engine.play();
  }

  send(given) {
    if (this.isSent) return; // one answer per trial
    this.isSent = true;
    this.engine.pause();
    this.model.send({ kind: "answer", number: this.page.number, given, seconds: (performance.now() - this.since) / 1000 });
  }
}

class BlindView {
  constructor(session, root) {
    Object.assign(this, { session, engine: session.engine, number: null, scores: {} });
    this.title = make("strong", { class: "vb-title" });
    this.place = make("span", { class: "va-quiet" });
    this.progress = make("progress", { class: "vb-progress", "aria-label": "Progress" });
    this.task = make("p", { class: "vb-task" });
    this.list = make("div", { class: "vb-list", role: "group", "aria-label": "Listen" });
    const button = (label, title, onclick, more = {}) => make("button", { type: "button", title, "aria-label": title, onclick, ...more }, label);
    this.playButton = button("", "Play (space)", () => this.toggle(), { class: "va-play" });
    this.loopButton = button("Loop", "Loop (l)", () => this.loop(), { "aria-pressed": "false" });
    this.time = make("span", { class: "va-time" });
    this.canvas = make("canvas", { "aria-hidden": "true" });
    this.seekBar = make("div", { class: "va-seek", role: "slider", tabindex: "0", "aria-label": "Position", title: "Click to seek, drag to loop a part" }, this.canvas);
    this.answers = make("div", { class: "vb-answers" });
    this.status = make("div", { class: "va-status", role: "status", "aria-live": "polite" });
    this.run = make("div", {}, this.task, this.list, make("div", { class: "va-bar" }, this.playButton, this.loopButton, this.time), this.seekBar, this.answers);
    this.outcome = make("div", { class: "vb-outcome", hidden: true });
    this.root = make("div", { class: "vgl-player vgl-blind", role: "group", tabindex: "-1", "aria-label": "Blind test" },
      make("div", { class: "vb-head" }, this.title, this.place, this.progress), this.run, this.outcome, this.status);
    root.append(this.root);
  }

  mount() {
    const signal = new AbortController();
    this.root.addEventListener("keydown", (event) => this.key(event), { signal: signal.signal });
    const letGo = [
      this.session.addView(this),
      followPointer(this.seekBar, () => ({ from: 0, to: this.engine.duration || 1 }), () => this.engine.region, {
        seek: (s) => this.engine.seek(s), region: (region, isFinal) => this.region(region, isFinal),
      }),
    ];
    const resized = new ResizeObserver(() => this.draw());
    resized.observe(this.seekBar);
    this.refresh();
    return () => {
      signal.abort();
      resized.disconnect();
      letGo.forEach((go) => go());
      cancelAnimationFrame(this.frame);
      this.root.remove();
    };
  }

  toggle() {
    if (this.engine.isPlaying) this.engine.pause();
    else if (this.session.isReady) this.engine.play();
  }

  loop() {
    if (!this.engine.setLoop(this.engine.region, !this.engine.isLooping)) this.session.say("This is too short to be looped: 0.02 s at least.");
  }

  region(region, isFinal) {
    const inside = region && [Math.max(0, region[0]), Math.min(this.engine.duration ?? 0, region[1])];
    this.dragged = isFinal ? null : inside;
    if (isFinal && this.session.isReady && this.engine.setLoop(inside, inside !== null) && inside) this.engine.seek(inside[0]);
    this.draw();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.session.isReady) return;
    const { page } = this.session, key = event.key.toLowerCase(), isSlider = event.target.tagName === "INPUT";
    const step = event.shiftKey ? 0.05 : 0.5, track = page.labels.findIndex((label) => label[0].toLowerCase() === key);
    const actions = { l: () => this.loop(), Escape: () => this.region(null, true) };
    if (!isSlider) {
      actions.ArrowLeft = () => this.engine.seek(this.engine.position - step);
      actions.ArrowRight = () => this.engine.seek(this.engine.position + step);
      actions.Home = () => this.engine.seek(0);
    }
    if (page.mode === "abx") Object.assign(actions, { 1: () => this.answer("A"), 2: () => this.answer("B") });
    let act = track >= 0 ? () => this.listen(track) : actions[event.key] ?? actions[key];
    const isOtherButton = event.target.tagName === "BUTTON" && event.target !== this.playButton && !event.target.classList.contains("vb-listen");
    if (event.key === " " && !isOtherButton) act = () => this.toggle();
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  listen(track) {
    this.session.listen(track);
    if (this.cards.some(({ element }) => element === document.activeElement)) this.cards[track].element.focus();
  }

  answer(given) {
    if (this.missing()) this.session.say(this.missing());
    else this.session.send(given);
  }

  // What is to be done before an answer counts.
  missing() {
    const { page, heard } = this.session;
    if (page.mode === "abx") return heard.has("X") ? "" : "Listen to X first.";
    const unheard = page.labels.filter((label) => !heard.has(label)), unrated = page.labels.slice(1).filter((label) => !(label in this.scores));
    if (unheard.length) return `Listen first to ${unheard.join(", ")}.`;
    return unrated.length ? `Rate ${unrated.join(", ")}, too.` : "";
  }

  // -------------------------------------------------------------------------------------------------- what people see

  build() {
    const { page } = this.session, isABX = page.mode === "abx";
    const hadFocus = this.root.contains(document.activeElement);
    this.number = page.number;
    this.scores = {};
    this.root.classList.toggle("vb-mushra", !isABX);
    this.task.textContent = isABX
      ? "X is either A or B. Switch while it plays, as often as you like, then say which. Whoever is not sure guesses."
      : "Rate each letter beside the reference. One of them is the reference itself, and should get 100. Switch while it plays.";
    this.cards = page.labels.map((label, track) => {
      const state = make("span", { class: "va-heard", "aria-hidden": "true" }, "playing");
      const element = make("button", { type: "button", class: "vb-listen", "aria-pressed": "false", "aria-label": `Listen to ${label}`, onclick: () => this.listen(track) },
        make("b", {}, label), make("kbd", { "aria-hidden": "true" }, label[0].toLowerCase()), state);
      const row = isABX || track === 0 ? element : make("div", { class: "vb-rate" }, element, ...this.slider(label));
      return { element, row };
    });
    this.list.replaceChildren(...this.cards.map(({ row }) => row));
    const say = (text, key, given) => make("button", { type: "button", class: "vb-answer", onclick: () => this.answer(given()) }, text, key && make("kbd", { "aria-hidden": "true" }, key));
    this.answers.replaceChildren(...(isABX
      ? [say("X is A", "1", () => "A"), say("X is B", "2", () => "B")]
      : [say(page.number === page.total ? "Finish" : "Next page", "", () => ({ ...this.scores }))]));
    if (hadFocus) this.root.focus({ preventScroll: true }); // the keys go on to work
  }

  slider(label) {
    const shown = make("output", { class: "vb-score" }, "not rated");
    const input = make("input", { type: "range", min: "0", max: "100", step: "1", value: "50", "aria-label": `Score of ${label}`, class: "vb-unrated" });
    const rate = () => {
      this.scores[label] = Number(input.value);
      input.classList.remove("vb-unrated");
      shown.textContent = `${input.value} · ${WORDS[Math.min(4, Math.floor(input.value / 20))]}`;
      input.setAttribute("aria-valuetext", shown.textContent);
      this.refresh();
    };
    input.addEventListener("input", rate);
    input.addEventListener("pointerup", rate); // 50 is a score, too
    return [make("div", { class: "vb-scale" }, input, make("div", { class: "vb-words", "aria-hidden": "true" }, ...WORDS.map((word) => make("span", {}, word)))), shown];
  }

  refresh() {
    const { session, engine } = this, { page, result } = session;
    this.status.textContent = session.message;
    this.status.hidden = !session.message;
    this.progress.max = page.total;
    this.progress.value = page.answered;
    this.run.hidden = Boolean(result);
    this.outcome.hidden = !result;
    if (result) return this.showOutcome(result, page);
    if (this.number !== page.number) this.build();
    this.title.textContent = `${page.mode === "abx" ? "Trial" : "Page"} ${page.number} of ${page.total}`;
    this.place.textContent = page.sample;
    this.root.setAttribute("aria-busy", String(!session.isReady));
    this.cards.forEach(({ element }, track) => {
      element.setAttribute("aria-disabled", String(!session.isReady));
      element.setAttribute("aria-pressed", String(session.isReady && engine.chosen.track === track && engine.isPlaying));
    });
    const missing = session.isReady ? this.missing() : "Loading.";
    for (const button of this.answers.children) {
      button.disabled = Boolean(missing);
      button.title = missing;
    }
    this.playButton.textContent = engine.isPlaying ? "❚❚ Pause" : "▶ Play";
    this.playButton.setAttribute("aria-label", engine.isPlaying ? "Pause (space)" : "Play (space)");
    this.loopButton.setAttribute("aria-pressed", String(engine.isLooping));
    cancelAnimationFrame(this.frame);
    const step = () => {
      this.draw();
      if (engine.isPlaying) this.frame = requestAnimationFrame(step);
    };
    this.frame = requestAnimationFrame(step);
  }

  showOutcome(result, page) {
    this.root.setAttribute("aria-busy", "false");
    this.title.textContent = result.headline;
    this.place.textContent = `${page.total} ${page.mode === "abx" ? "trials" : "pages"}`;
    const row = (cells, tag) => make("tr", {}, ...cells.map((cell) => make(tag, tag === "th" ? { scope: "col" } : {}, cell)));
    const table = make("table", {}, make("thead", {}, row(result.columns, "th")), make("tbody", {}, ...result.rows.map((cells) => row(cells, "td"))));
    this.outcome.replaceChildren(make("p", { class: "vb-text" }, result.text), make("details", {}, make("summary", {}, "Every answer"), make("div", { class: "vb-table" }, table)));
  }

  draw() {
    if (!this.seekBar.clientWidth) return;
    const { context, width, height } = fit(this.canvas), { engine } = this, duration = engine.duration || 1;
    const style = getComputedStyle(this.root), accent = style.getPropertyValue("--va-accent").trim() || "#2878c8";
    const x = (seconds) => (seconds / duration) * width, region = this.dragged ?? engine.region, at = this.session.isReady ? engine.position : 0;
    context.fillStyle = style.color;
    context.globalAlpha = 0.16;
    context.fillRect(0, height / 2 - 4, width, 8);
    context.globalAlpha = 1;
    context.fillStyle = accent;
    context.fillRect(0, height / 2 - 4, x(at), 8);
    if (region) {
      context.globalAlpha = 0.25;
      context.fillRect(x(region[0]), 0, x(region[1]) - x(region[0]), height);
      context.globalAlpha = 1;
      for (const edge of region) context.fillRect(Math.round(x(edge)) - 1, 0, 2, height);
    }
    context.beginPath();
    context.arc(Math.min(Math.max(x(at), 8), width - 8), height / 2, 8, 0, 7);
    context.fill();
    const text = `${clock(at)} s of ${clock(duration)} s`;
    this.time.textContent = text + (region ? ` · loop ${clock(region[0])} to ${clock(region[1])} s` : "");
    const aria = { "aria-valuemin": 0, "aria-valuemax": duration.toFixed(3), "aria-valuenow": at.toFixed(3), "aria-valuetext": text };
    for (const [name, value] of Object.entries(aria)) this.seekBar.setAttribute(name, value);
  }
}

export default () => {
  let session = null;
  return {
    initialize({ model }) {
      session = new BlindSession(model);
      return () => session.dispose();
    },
    render({ model, el }) {
      session ??= new BlindSession(model);
      return new BlindView(session, el).mount();
    },
  };
};
