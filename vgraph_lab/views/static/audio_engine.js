// Plays several tracks of one clip in lock step; which of them is heard is a matter of gains, so that switching has no gap.
//
//   source 0 ─ fade 0 ─┬────────────────── lane "0"  ─┐
//                      └─ × −1 ─┐                      ├─ shared gain ─┬─ destination
//   source n ─ fade n ─┬────────┼───────── lane "n"  ─┤               └─ analyser (level meter)
//                      └────────┴─ × gain ─ lane "n−0" ┘
//
// The context runs at the clips' own sample rate and sources start on whole samples: what a lane plays are the samples
// that came, bit for bit, and the browser resamples once, at the very end. Differences are subtracted before they are
// amplified, in float32, so equal samples give exact zeros. All times are seconds of the context's clock or of the clip.

export const CROSSFADE_S = 0.004;
const LOOKAHEAD_S = 0.02; // events in the render thread's past would be cut short
const SHORTEST_LOOP_S = 0.02;
const GESTURE_WAIT_MS = 400;

export class AudioEngine {
  // events: onChange(), onSwitch(record), onHeard(record), onBlocked(), onFailed(error)
  constructor({ sampleRate, gain = 1, createContext, ...events }) {
    this.sampleRate = sampleRate;
    this.gain = gain;
    this.createContext = createContext ?? (() => new AudioContext({ sampleRate, latencyHint: "interactive" }));
    this.events = events;
    this.context = null;
    this.clip = null;
    this.isPlaying = false;
    this.chosen = { track: 0, difference: false };
    this.region = null;
    this.isLooping = false;
    this.rest = 0; // where it stands while it does not play
    this.settled = 0; // clock: the last crossfade is over
  }

  // clip: {name, tracks: [Float32Array], amplify: [null | factor of the difference from track 0]}
  load(clip, position = 0) {
    const resume = this.isPlaying;
    this.halt();
    this.#release();
    this.clip = clip;
    this.length = Math.max(...clip.tracks.map((track) => track.length));
    this.duration = this.length / this.sampleRate;
    this.region = null;
    this.rest = Math.min(Math.max(position, 0), this.duration);
    if (!this.#hasLane(this.chosen)) this.chosen = { track: Math.min(this.chosen.track, clip.tracks.length - 1), difference: false };
    if (resume) this.begin();
    this.#changed();
  }

  // Start as a person's gesture allows: browsers keep a context silent until somebody clicks or presses a key.
  async play() {
    if (this.isPlaying || !this.clip) return;
    let context;
    try {
      context = this.#ready();
    } catch (error) { // a sample rate that the browser does not play
      this.events.onFailed?.(error);
      return this.#changed();
    }
    this.isWanted = true;
    if (context.state !== "running") {
      await Promise.race([context.resume().catch(() => {}), new Promise((done) => setTimeout(done, GESTURE_WAIT_MS))]);
    }
    if (!this.isWanted || this.isPlaying || context !== this.context) return;
    this.isWanted = false;
    if (context.state === "running") this.begin();
    else this.events.onBlocked?.();
    this.#changed();
  }

  begin() {
    this.#ready();
    if (!this.voices || this.voices.clip !== this.clip) this.#wire();
    const from = this.rest >= this.duration ? 0 : this.rest;
    this.isPlaying = true;
    this.#start(from);
    this.#changed();
  }

  pause() {
    this.isWanted = false;
    if (!this.isPlaying) return;
    this.halt();
    this.#changed();
  }

  halt() {
    if (!this.isPlaying) return;
    this.rest = this.position;
    this.#note(this.context.currentTime);
    this.#stop(this.context.currentTime + LOOKAHEAD_S);
    this.isPlaying = false;
  }

  seek(position) {
    const to = Math.min(Math.max(position, 0), this.duration ?? 0);
    if (this.isPlaying) this.#start(Math.min(to, this.duration - 1 / this.sampleRate));
    else this.rest = to;
    this.#changed();
  }

  // region: [from, to] in seconds, or null for the whole clip. Answers whether it is long enough to be looped.
  setLoop(region, isLooping) {
    if (!this.clip) return false;
    const [from, to] = region ?? [0, this.duration];
    const isLong = to - from >= SHORTEST_LOOP_S;
    const same = this.isLooping === (isLooping && isLong) && String(this.region) === String(region);
    if (region === null || isLong) this.region = region;
    this.isLooping = isLooping && isLong;
    if (same) return isLong;
    if (this.isPlaying) this.#start(this.position);
    this.#changed();
    return isLong;
  }

  // Hear another track, or its difference from track 0. False if there is no such lane.
  select(track, difference = false) {
    const to = { track, difference };
    if (!this.clip) this.chosen = to;
    if (!this.clip || laneOf(to) === laneOf(this.chosen)) return true;
    if (!this.#hasLane(to)) return false;
    const from = this.chosen;
    if (this.isPlaying) {
      const requested = this.context.currentTime;
      const begins = Math.max(requested + LOOKAHEAD_S, this.settled);
      const ends = begins + CROSSFADE_S;
      this.#ramp(laneOf(from), 0, begins, ends);
      this.#ramp(laneOf(to), 1, begins, ends);
      this.settled = ends;
      this.#note(begins, to);
      const record = { clip: this.clip.name, from, to, position_s: this.positionAt(begins) };
      this.events.onSwitch?.({ ...record, requested_s: requested, begins_s: begins, ends_s: ends });
    } else if (this.voices) {
      this.voices.lanes[laneOf(from)].gain.value = 0;
      this.voices.lanes[laneOf(to)].gain.value = 1;
    }
    this.chosen = to;
    this.#changed();
    return true;
  }

  get position() {
    return this.isPlaying ? this.positionAt(this.context.currentTime) : this.rest;
  }

  positionAt(clock) {
    const { start, offset, loop } = this.voices.run;
    const along = offset + Math.max(clock - start, 0);
    if (!loop) return Math.min(along, this.duration);
    return along < loop[1] ? along : loop[0] + ((along - loop[0]) % (loop[1] - loop[0]));
  }

  // Peak and RMS of the last moments, as played; zeros while nothing does.
  levels() {
    if (!this.isPlaying) return { peak: 0, rms: 0 };
    this.analyser.getFloatTimeDomainData(this.scope);
    let peak = 0, sum = 0;
    for (const value of this.scope) {
      peak = Math.max(peak, Math.abs(value));
      sum += value * value;
    }
    return { peak, rms: Math.sqrt(sum / this.scope.length) };
  }

  // Give the context back to the browser. The engine can be used again and makes a new one then.
  close() {
    this.pause();
    this.#release();
    const context = this.context;
    this.context = this.analyser = this.output = null;
    this.settled = 0;
    if (context && context.state !== "closed") context.close?.().catch(() => {});
    this.#changed();
  }

  #changed() {
    this.events.onChange?.();
  }

  #hasLane({ track, difference }) {
    const amplify = this.clip.amplify?.[track];
    return track in this.clip.tracks && (!difference || (track > 0 && amplify !== null && amplify !== undefined));
  }

  #ready() {
    if (this.context) return this.context;
    this.context = this.createContext();
    this.output = new GainNode(this.context, { gain: this.gain });
    this.analyser = new AnalyserNode(this.context, { fftSize: 2048 });
    this.scope = new Float32Array(this.analyser.fftSize);
    this.output.connect(this.analyser);
    this.output.connect(this.context.destination);
    return this.context;
  }

  #wire() {
    this.#release();
    const { context, clip } = this;
    const lanes = {}, inputs = [], buffers = [];
    const lane = (name) => {
      lanes[name] = new GainNode(context, { gain: name === laneOf(this.chosen) ? 1 : 0 });
      lanes[name].connect(this.output);
      return lanes[name];
    };
    clip.tracks.forEach((track, index) => {
      const buffer = new AudioBuffer({ length: this.length, sampleRate: this.sampleRate }); // the shorter ones end in silence
      buffer.copyToChannel(track, 0);
      buffers.push(buffer);
      inputs.push(new GainNode(context));
      inputs[index].connect(lane(String(index)));
    });
    const inverted = new GainNode(context, { gain: -1 });
    inputs[0].connect(inverted);
    clip.tracks.forEach((_, index) => {
      if (!this.#hasLane({ track: index, difference: true })) return;
      const amplifier = new GainNode(context, { gain: clip.amplify[index] });
      inputs[index].connect(amplifier);
      inverted.connect(amplifier);
      amplifier.connect(lane(laneOf({ track: index, difference: true })));
    });
    this.voices = { clip, lanes, inputs, buffers, levels: { [laneOf(this.chosen)]: 1 }, run: null };
  }

  // One run of all sources together. A run that is under way fades out while the next one fades in.
  #start(position) {
    const { context, voices, sampleRate } = this;
    const whole = (seconds) => Math.round(seconds * sampleRate) / sampleRate;
    const start = Math.ceil((context.currentTime + (isOffline(context) ? 0 : LOOKAHEAD_S)) * sampleRate) / sampleRate;
    if (voices.run) {
      this.#note(start);
      this.#stop(start);
    }
    const loop = this.isLooping ? (this.region ?? [0, this.duration]).map(whole) : null;
    const offset = loop && (position < loop[0] || position >= loop[1]) ? loop[0] : whole(position);
    const sources = voices.inputs.map((input, index) => {
      const source = new AudioBufferSourceNode(context, { buffer: voices.buffers[index] });
      if (loop) Object.assign(source, { loop: true, loopStart: loop[0], loopEnd: loop[1] });
      const fade = new GainNode(context, { gain: offset > 0 ? 0 : 1 }); // a start within a clip would click
      if (offset > 0) {
        fade.gain.setValueAtTime(0, start);
        fade.gain.linearRampToValueAtTime(1, start + CROSSFADE_S);
      }
      source.connect(fade).connect(input);
      source.start(start, offset);
      return { source, fade };
    });
    const run = { start, offset, loop, sources, heardFrom: start };
    voices.run = run;
    sources[0].source.onended = () => {
      if (voices.run !== run || !this.isPlaying) return;
      this.#note(start + this.duration - offset);
      voices.run = null;
      this.isPlaying = false;
      this.rest = 0;
      this.#changed();
    };
  }

  #stop(at) {
    const { run } = this.voices;
    for (const { source, fade } of run.sources) {
      fade.gain.cancelScheduledValues(at);
      fade.gain.setValueAtTime(1, at);
      fade.gain.linearRampToValueAtTime(0, at + CROSSFADE_S);
      source.stop(at + CROSSFADE_S);
    }
    this.voices.run = null;
  }

  #ramp(name, to, begins, ends) {
    const { lanes, levels } = this.voices;
    lanes[name].gain.setValueAtTime(levels[name] ?? 0, begins);
    lanes[name].gain.linearRampToValueAtTime(to, ends);
    levels[name] = to;
  }

  // What was heard up to now is told once, and counted anew from there.
  #note(clock) {
    const { run } = this.voices;
    const seconds = clock - run.heardFrom;
    if (seconds > 0) this.events.onHeard?.({ clip: this.clip.name, ...this.chosen, position_s: this.positionAt(run.heardFrom), seconds });
    run.heardFrom = Math.max(clock, run.heardFrom);
  }

  #release() {
    if (!this.voices) return;
    if (this.voices.run) this.#stop(this.context.currentTime);
    const { lanes } = this.voices;
    this.voices = null;
    if (this.context) setTimeout(() => Object.values(lanes).forEach((lane) => lane.disconnect()), 200); // after the fade
  }
}

const laneOf = ({ track, difference }) => (difference ? `${track}−0` : String(track));

const isOffline = (context) => typeof OfflineAudioContext !== "undefined" && context instanceof OfflineAudioContext;
