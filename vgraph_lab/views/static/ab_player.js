// The A/B player as people see it. The session has the state, and its engine plays.
import { followPointer, make } from "./audio_canvas.js";
import { Pictures } from "./ab_pictures.js";
import { Session } from "./ab_session.js";

const QUIET_MOTION = window.matchMedia("(prefers-reduced-motion: reduce)");
const KEYS = [
  ["Space", "play or pause"], ["1 … 9", "hear that condition"], ["d", "difference from the reference"], ["l", "loop on or off"],
  ["[  ]", "region starts or ends here"], ["Esc", "no region"], ["← →", "0.5 s back or on; with Shift 0.05 s"], ["Home End", "to the start or end"],
  ["+ −", "zoom in or out"], ["0", "show everything"], ["n  p", "next or previous sample"], ["?", "this list"],
];

class View extends Pictures {
  constructor(session, root) {
    super();
    Object.assign(this, { session, engine: session.engine, from: 0, to: 1, painted: "", held: { peak: 0, until: 0 } });
    const { index } = session;
    const button = (label, title, onclick, more = {}) => make("button", { type: "button", title, "aria-label": title, onclick, ...more }, label);
    this.choice = make("select", { "aria-label": "Sample", onchange: () => session.pick(this.choice.value) },
      ...index.samples.map(({ name }) => make("option", { value: name }, name)));
    this.detail = make("div", { class: "va-detail" });
    this.place = make("span", { class: "va-quiet" });
    this.previous = button("‹", "Previous sample (p)", () => session.step(-1));
    this.next = button("›", "Next sample (n)", () => session.step(1));
    this.tracks = index.conditions.map(({ name, colour }, track) => {
      const note = make("span", { class: "va-note" });
      const element = make("button", { type: "button", class: "va-track", style: `--va-track:${colour}`, "aria-pressed": "false",
        "aria-label": `Hear ${name}`, onclick: () => this.hear(track) },
        make("span", { class: "va-name" }, track < 9 ? make("kbd", { "aria-hidden": "true" }, String(track + 1)) : null, make("b", {}, name),
          make("span", { class: "va-heard", "aria-hidden": "true" }, "heard")), note);
      return { element, note, colour, name };
    });
    this.playButton = button("", "Play (space)", () => this.toggle(), { class: "va-play" });
    this.loopButton = button("Loop", "Loop (l)", () => this.loop(), { "aria-pressed": "false" });
    this.differenceButton = button("Difference", `Hear the difference from ${session.names[0]} (d)`, () => this.difference(), { "aria-pressed": "false" });
    this.time = make("span", { class: "va-time" });
    this.wave = make("canvas", { class: "va-wave", "aria-hidden": "true" });
    this.spectrum = make("canvas", { class: "va-spectrum", "aria-hidden": "true" });
    this.overlay = make("canvas", { class: "va-overlay", "aria-hidden": "true" });
    this.overview = make("canvas", { class: "va-overview", "aria-hidden": "true" });
    this.timeline = make("div", { class: "va-picture", role: "slider", tabindex: "0", "aria-label": "Position" }, this.wave, this.spectrum, this.overlay);
    this.strip = make("div", { class: "va-strip", title: "The whole sample; click to show another part" }, this.overview);
    this.shown = make("span", { class: "va-quiet" });
    this.meterRms = make("span", { class: "va-rms" });
    this.meterPeak = make("span", { class: "va-peak" });
    this.meter = make("div", { class: "va-meter", role: "meter", "aria-label": "Level", "aria-valuemin": "-60", "aria-valuemax": "0", "aria-valuenow": "-60" }, this.meterRms, this.meterPeak);
    this.levels = make("span", { class: "va-levels" });
    this.status = make("div", { class: "va-status", role: "status", "aria-live": "polite" });
    this.help = make("dl", { class: "va-help", hidden: true }, ...KEYS.map(([key, does]) => make("div", {}, make("dt", {}, make("kbd", {}, key)), make("dd", {}, does))));
    this.helpButton = button("?", "Keys (?)", () => this.showHelp(), { "aria-expanded": "false" });
    this.root = make("div", { class: "vgl-player", role: "group", tabindex: "-1", "aria-label": `A/B player: ${session.names.join(", ")}` },
      make("div", { class: "va-head" }, make("div", { class: "va-pick" }, this.previous, this.choice, this.next, this.place), this.detail),
      make("div", { class: "va-tracks", role: "group", "aria-label": "Condition" }, ...this.tracks.map(({ element }) => element)),
      make("div", { class: "va-bar" }, this.playButton, this.loopButton, this.differenceButton, this.time,
        make("div", { class: "va-tools" }, button("−", "Zoom out (−)", () => this.zoom(2)), button("+", "Zoom in (+)", () => this.zoom(0.5)),
          button("Fit", "Show everything (0)", () => this.fit()), this.helpButton)),
      this.help, this.timeline, this.strip,
      make("div", { class: "va-foot" }, make("div", { class: "va-meterline" }, this.meter, this.levels), this.shown,
        make("span", { class: "va-quiet" }, `One gain for everything: ${index.gainText}; nothing is normalised.`)),
      this.status);
    root.append(this.root);
  }

  mount() {
    const signal = new AbortController();
    this.root.addEventListener("keydown", (event) => this.key(event), { signal: signal.signal });
    const view = () => this, region = () => this.engine.region;
    const letGo = [
      this.session.addView(this),
      followPointer(this.timeline, view, region, {
        seek: (s) => this.seek(s), region: (r, isFinal) => this.region(r, isFinal), zoom: (factor, s) => this.zoom(factor, s), pan: (s) => this.pan(s),
      }),
      followPointer(this.strip, () => ({ from: 0, to: this.duration }), () => null, {
        seek: (s) => this.pan(s - (this.from + this.to) / 2), region: (r) => r && this.window(...r),
      }),
    ];
    const resized = new ResizeObserver(() => this.paint(true));
    resized.observe(this.timeline);
    const themed = new MutationObserver(() => this.paint(true));
    for (const node of [document.documentElement, document.body]) themed.observe(node, { attributes: true, attributeFilter: ["class", "data-jp-theme-light", "data-theme", "style"] });
    const scheme = window.matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", () => this.paint(true), { signal: signal.signal });
    this.say(this.session.message);
    this.refresh();
    return () => {
      signal.abort();
      resized.disconnect();
      themed.disconnect();
      letGo.forEach((go) => go());
      cancelAnimationFrame(this.frame);
      clearTimeout(this.slice);
      this.root.remove();
    };
  }

  get duration() {
    return this.session.clip ? this.engine.duration : 1;
  }

  // -------------------------------------------------------------------------------------------------- what people do

  toggle() {
    if (this.engine.isPlaying) this.engine.pause();
    else if (this.session.clip) {
      this.session.say("");
      this.engine.play();
    }
  }

  hear(track) {
    const keeps = this.engine.chosen.difference && track > 0 && this.session.clip?.amplify[track] !== null;
    this.engine.select(track, keeps);
    if (this.tracks.some(({ element }) => element === document.activeElement)) this.tracks[track].element.focus();
  }

  difference() {
    const { track, difference } = this.engine.chosen, names = this.session.names;
    if (difference || this.engine.select(track, true)) {
      if (difference) this.engine.select(track, false);
      return;
    }
    this.say(track === 0 ? `${names[0]} is the reference. Choose another condition to hear how it differs.` : `${names[track]}: ${this.session.clip.differences[track].label}`);
  }

  loop() {
    if (!this.engine.setLoop(this.engine.region, !this.engine.isLooping)) this.say("This is too short to be looped: 0.02 s at least.");
  }

  region(region, isFinal = true) {
    if (!this.session.clip) return;
    this.dragged = region && !isFinal ? this.inside(region) : null;
    if (isFinal) {
      if (!this.engine.setLoop(region && this.inside(region), region !== null)) this.say("A region has 0.02 s at least.");
      else if (region) this.engine.seek(this.inside(region)[0]);
    }
    this.overlayOnce();
  }

  edge(side) {
    const at = this.engine.position, [from, to] = this.engine.region ?? [0, this.duration];
    const region = side === 0 ? [at, to > at ? to : this.duration] : [from < at ? from : 0, at];
    if (!this.engine.setLoop(region, true)) this.say("A region has 0.02 s at least.");
  }

  inside([from, to]) {
    return [Math.max(0, from), Math.min(this.duration, to)];
  }

  seek(seconds) {
    this.engine.seek(seconds);
    const at = this.engine.position;
    if (at < this.from || at > this.to) this.pan(at - (this.from + this.to) / 2);
  }

  window(from, to) {
    const least = Math.min(this.duration, 32 / this.session.index.sampleRate), length = Math.min(Math.max(to - from, least), this.duration);
    this.from = Math.min(Math.max(from, 0), this.duration - length);
    this.to = this.from + length;
    this.paint();
  }

  zoom(factor, around = this.middle()) {
    this.window(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  middle() {
    const at = this.engine.position;
    return at > this.from && at < this.to ? at : (this.from + this.to) / 2;
  }

  pan(by) {
    this.window(this.from + by, this.to + by);
  }

  fit() {
    this.window(0, this.duration);
  }

  showHelp(isShown = this.help.hidden) {
    this.help.hidden = !isShown;
    this.helpButton.setAttribute("aria-expanded", String(isShown));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT") return;
    const step = event.shiftKey ? 0.05 : 0.5, at = this.engine.position;
    const actions = {
      d: () => this.difference(), l: () => this.loop(), "?": () => this.showHelp(), "+": () => this.zoom(0.5), "=": () => this.zoom(0.5),
      "-": () => this.zoom(2), 0: () => this.fit(), n: () => this.session.step(1), p: () => this.session.step(-1),
      "[": () => this.edge(0), "]": () => this.edge(1), Escape: () => (this.help.hidden ? this.region(null) : this.showHelp(false)),
      ArrowLeft: () => this.seek(at - step), ArrowRight: () => this.seek(at + step), Home: () => this.seek(0), End: () => this.seek(this.duration),
    };
    let act = actions[event.key] ?? actions[event.key.toLowerCase()];
    if (event.key === " ") act = event.target.tagName === "BUTTON" && event.target !== this.playButton && event.target.matches(":focus-visible") && !event.target.classList.contains("va-track") ? null : () => this.toggle();
    if (/^[1-9]$/.test(event.key) && this.tracks[event.key - 1]) act = () => this.hear(event.key - 1);
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  // -------------------------------------------------------------------------------------------------- what people see

  say(message) {
    this.status.textContent = message;
    this.status.hidden = !message;
  }

  refresh() {
    const { session, engine } = this, { clip, index } = session, { chosen } = engine;
    if (this.choice.value !== session.wanted) this.choice.value = session.wanted;
    const position = index.samples.findIndex(({ name }) => name === session.wanted);
    this.place.textContent = `${position + 1} of ${index.samples.length}`;
    this.previous.setAttribute("aria-disabled", String(position <= 0)); // disabled would lose the focus
    this.next.setAttribute("aria-disabled", String(position >= index.samples.length - 1));
    this.detail.textContent = index.samples[position]?.detail ?? "";
    this.root.setAttribute("aria-busy", String(clip?.name !== session.wanted));
    if (!clip) return;
    if (this.clipName !== clip.name) {
      this.clipName = clip.name;
      [this.from, this.to] = [0, this.duration];
    }
    const current = index.samples.find(({ name }) => name === clip.name), lengths = current.lengths;
    this.tracks.forEach(({ element, note }, track) => {
      const difference = clip.differences[track];
      element.setAttribute("aria-pressed", String(chosen.track === track));
      const seconds = `${(lengths[track] / index.sampleRate).toFixed(3)} s`;
      const odd = track > 0 && lengths[track] !== lengths[0] ? ` · ${seconds}` : "";
      note.textContent = (track === 0 ? "reference" : `difference: ${difference.label.replace(": ", ", ")}`) + odd;
    });
    this.playButton.textContent = engine.isPlaying ? "❚❚ Pause" : "▶ Play";
    this.playButton.setAttribute("aria-label", engine.isPlaying ? "Pause (space)" : "Play (space)");
    this.loopButton.setAttribute("aria-pressed", String(engine.isLooping));
    this.differenceButton.setAttribute("aria-pressed", String(chosen.difference));
    this.differenceButton.classList.toggle("va-off", chosen.track === 0 || clip.amplify[chosen.track] === null);
    const name = this.tracks[chosen.track].name;
    this.shown.textContent = chosen.difference ? `Shown and heard: ${name} − ${session.names[0]}, ${clip.differences[chosen.track].label}` : `Shown and heard: ${name}`;
    this.paint();
    this.tick();
  }

  tick() {
    cancelAnimationFrame(this.frame);
    this.drawn = 0;
    const step = (now) => {
      if (!this.root.isConnected) return;
      if (!QUIET_MOTION.matches || now - this.drawn > 250 || !this.engine.isPlaying) {
        this.drawn = now;
        this.follow();
        this.drawOverlay();
        this.drawLevels(now);
      }
      if (this.engine.isPlaying) {
        this.session.report(false);
        this.frame = requestAnimationFrame(step);
      }
    };
    this.frame = requestAnimationFrame(step);
  }

  overlayOnce() {
    if (!this.engine.isPlaying) requestAnimationFrame(() => this.drawOverlay());
  }

  // A playhead that leaves the picture turns the page.
  follow() {
    const at = this.engine.position;
    if (this.engine.isPlaying && (at > this.to || at < this.from)) this.window(at, at + this.to - this.from);
  }
}

export default () => {
  let session = null;
  return {
    initialize({ model }) {
      session = new Session(model);
      return () => session.dispose();
    },
    render({ model, el }) {
      session ??= new Session(model);
      return new View(session, el).mount();
    },
  };
};
