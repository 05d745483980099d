// The A/B player's state: one per model, whatever the number of views. It fetches clips and keeps engine and Python in step.
import { AudioEngine } from "./audio_engine.js";
import { Envelope } from "./audio_canvas.js";

const PREFETCH_BYTES = 64e6, KEPT_BYTES = 256e6;
const REPORT_MS = 400;

export class Session {
  constructor(model) {
    this.model = model;
    this.index = model.get("_index");
    this.samples = new Map(this.index.samples.map((sample) => [sample.name, sample]));
    this.names = this.index.conditions.map((condition) => condition.name);
    this.clips = new Map();
    this.requests = new Map();
    this.views = new Set();
    this.switches = [];
    this.message = "";
    this.engine = new AudioEngine({
      sampleRate: this.index.sampleRate,
      gain: this.index.gain,
      onChange: () => this.changed(),
      onSwitch: (record) => this.#tellSwitch(record),
      onHeard: ({ clip, track, ...rest }) => this.#tell("heard", { sample: clip, condition: this.names[track], ...rest }),
      onBlocked: () => this.say("The browser starts sound only after a click or a key here. Press Play."),
      onFailed: (error) => this.say(`This browser cannot play audio at ${this.index.sampleRate} Hz: ${error.message}`),
    });
    this.listeners = {
      "msg:custom": (content, buffers) => this.#receive(content, buffers),
      "change:sample": () => this.#ours() || !this.began || this.show(model.get("sample")),
      "change:condition change:is_difference": () => this.#ours() || this.#select(),
      "change:position_s": () => this.#ours() || this.engine.seek(model.get("position_s")),
      "change:region_s change:is_looping": () => this.#ours() || this.#loop(),
      "change:is_playing": () => this.#ours() || (model.get("is_playing") ? this.engine.play() : this.engine.pause()),
    };
    for (const [events, listener] of Object.entries(this.listeners)) events.split(" ").forEach((event) => model.on(event, listener));
    this.wanted = model.get("sample");
  }

  dispose() {
    for (const [events, listener] of Object.entries(this.listeners)) events.split(" ").forEach((event) => this.model.off(event, listener));
    this.engine.close();
    this.clips.clear();
  }

  addView(view) {
    this.views.add(view);
    if (!this.began) {
      this.began = performance.now();
      this.show(this.model.get("sample")); // nothing is fetched for a player that nobody looks at
    }
    return () => {
      this.views.delete(view);
      if (!this.views.size) this.engine.close(); // the cell was run again or removed: nobody could stop the sound any more
    };
  }

  get clip() {
    return this.engine.clip;
  }

  say(message) {
    this.message = message;
    this.views.forEach((view) => view.say(message));
  }

  changed() {
    this.views.forEach((view) => view.refresh());
    this.report();
  }

  // What the engine does is written into the model; while it plays, not more often than REPORT_MS.
  report(force = true) {
    const { engine, model } = this, now = performance.now();
    if (!engine.clip || (!force && now - (this.reported ?? 0) < REPORT_MS)) return;
    this.reported = now;
    this.isReporting = true;
    const state = {
      sample: engine.clip.name, condition: this.names[engine.chosen.track], is_difference: engine.chosen.difference,
      is_playing: engine.isPlaying, is_looping: engine.isLooping, region_s: engine.region, position_s: engine.position,
      audio_state: engine.context?.state ?? "idle",
    };
    for (const [name, value] of Object.entries(state)) if (String(model.get(name)) !== String(value)) model.set(name, value);
    model.save_changes();
    this.isReporting = false;
  }

  // --------------------------------------------------------------------------------------------------------- clips

  async show(name) {
    this.wanted = name;
    const resume = this.engine.isPlaying;
    if (!this.clips.has(name) && resume) this.engine.pause();
    this.views.forEach((view) => view.refresh());
    const clip = await this.fetch(name);
    if (this.wanted !== name || !clip) return;
    const { model, engine } = this;
    const isLooping = model.get("is_looping"), region = model.get("region_s");
    const position = model.get("sample") === name ? model.get("position_s") : 0;
    this.#choose(model.get("condition"), model.get("is_difference"), clip);
    engine.load(clip, position);
    engine.setLoop(region, isLooping);
    this.say("");
    if (resume || model.get("is_playing")) engine.play();
    if (!model.get("ready_ms")) {
      model.set("ready_ms", Math.round((performance.now() - this.began) * 10) / 10);
      model.save_changes();
      this.#prefetch();
    }
  }

  step(by) {
    const names = [...this.samples.keys()], at = names.indexOf(this.wanted) + by;
    if (at >= 0 && at < names.length) this.pick(names[at]);
  }

  // A person's choice: from the start, without a region.
  pick(name) {
    if (name === this.wanted) return;
    this.isReporting = true;
    this.model.set({ sample: name, position_s: 0, region_s: null });
    this.model.save_changes();
    this.isReporting = false;
    this.show(name);
  }

  fetch(name) {
    if (this.clips.has(name)) {
      const clip = this.clips.get(name);
      this.clips.delete(name); // the latest is the last
      this.clips.set(name, clip);
      return Promise.resolve(clip);
    }
    if (!this.requests.has(name)) {
      const request = { received: 0 };
      request.promise = new Promise((resolve) => (request.resolve = resolve));
      this.requests.set(name, request);
      this.model.send({ kind: "fetch", sample: name });
      setTimeout(() => {
        if (this.requests.has(name) && !request.received && this.wanted === name) this.say("Waiting for the kernel. Is a cell running?");
      }, 1500);
    }
    return this.requests.get(name).promise;
  }

  #receive(content, buffers) {
    const request = this.requests.get(content.sample);
    if (content.kind === "refused") {
      this.say(content.message);
      request?.resolve(null);
      this.requests.delete(content.sample);
    } else if (content.kind === "clip" && request) {
      const { lengths } = this.samples.get(content.sample);
      Object.assign(request, { differences: content.differences, tracks: lengths.map((length) => new Float32Array(length)) });
      request.total = lengths.reduce((sum, length) => sum + length, 0);
    } else if (content.kind === "piece" && request?.tracks) {
      const bytes = buffers[0];
      const piece = new Float32Array(bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength));
      request.tracks[content.track].set(piece, content.offset);
      request.received += piece.length;
      if (request.received >= request.total) this.#complete(content.sample, request);
      else if (this.wanted === content.sample) this.say(`Loading: ${Math.floor((100 * request.received) / request.total)} %`);
    }
  }

  #complete(name, { tracks, differences, resolve, total }) {
    const clip = { name, tracks, differences, bytes: 4 * total, envelopes: tracks.map((track) => new Envelope(track)) };
    clip.amplify = differences.map((difference) => (difference.gain_db === null ? null : 10 ** (difference.gain_db / 20)));
    this.clips.set(name, clip);
    this.requests.delete(name);
    let kept = [...this.clips.values()].reduce((sum, { bytes }) => sum + bytes, 0);
    for (const [other, { bytes }] of this.clips) {
      if (kept <= KEPT_BYTES) break;
      if (other === name || other === this.wanted) continue;
      this.clips.delete(other);
      kept -= bytes;
    }
    resolve(clip);
  }

  async #prefetch() {
    const bytes = this.index.samples.reduce((sum, { lengths }) => sum + 4 * lengths.reduce((a, b) => a + b, 0), 0);
    if (bytes <= PREFETCH_BYTES) for (const name of this.samples.keys()) await this.fetch(name);
    this.model.set("loaded_ms", Math.round((performance.now() - this.began) * 10) / 10);
    this.model.save_changes();
  }

  // ------------------------------------------------------------------------------------------------ Python's wishes

  #ours() {
    return this.isReporting;
  }

  #choose(condition, isDifference, clip) {
    const track = Math.max(this.names.indexOf(condition), 0);
    this.engine.chosen = { track, difference: isDifference && clip.amplify[track] !== null };
  }

  #select() {
    if (this.clip?.name !== this.wanted) return; // applied when the clip is here
    this.engine.select(Math.max(this.names.indexOf(this.model.get("condition")), 0), this.model.get("is_difference"));
  }

  #loop() {
    if (this.clip?.name !== this.wanted) return;
    if (!this.engine.setLoop(this.model.get("region_s"), this.model.get("is_looping"))) this.report(); // too short: Python shall know
  }

  #tellSwitch({ clip, from, to, ...times }) {
    const name = ({ track, difference }) => this.names[track] + (difference ? ` − ${this.names[0]}` : "");
    const record = { sample: clip, before: name(from), after: name(to), ...times };
    this.switches.push(record);
    this.#tell("switch", record);
  }

  #tell(kind, { difference, ...record }) {
    this.model.send({ kind, ...record, ...(difference === undefined ? {} : { is_difference: difference }) });
  }
}
