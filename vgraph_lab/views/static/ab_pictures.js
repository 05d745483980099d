// What the A/B player draws: waveform, seams, spectrogram, overview, playhead and level meter.
import { Envelope, clock, decibels, fit, spectrogram, FLOOR_DB, CEILING_DB, roundUp, tickStep } from "./audio_canvas.js";

// The drawing half of a view, which has the canvases, `session`, `engine`, and [from, to] in seconds.
export class Pictures {
  ink() {
    const style = getComputedStyle(this.root);
    return { ink: style.color, accent: style.getPropertyValue("--va-accent").trim() || "#2878c8" };
  }

  lane() {
    const { chosen } = this.engine, { clip } = this.session;
    const gain = chosen.difference ? clip.amplify[chosen.track] : 1;
    return { ...chosen, gain, samples: clip.tracks[chosen.track], reference: chosen.difference ? clip.tracks[0] : null };
  }

  paint(isForced = false) {
    const { clip } = this.session;
    if (!clip || !this.timeline.clientWidth) return;
    const { track, difference } = this.engine.chosen;
    const state = [clip.name, track, difference, this.from, this.to, this.timeline.clientWidth].join("|");
    if (state === this.painted && !isForced) return;
    this.painted = state;
    this.drawWave();
    this.drawSpectrum();
    this.drawOverview();
    this.overlayOnce();
    this.drawOverlay();
  }

  drawWave() {
    const { context, width, height } = fit(this.wave), { ink } = this.ink(), { clip, index } = this.session;
    const axis = 18, lane = this.lane(), rate = index.sampleRate, middle = (height - axis) / 2;
    const sample = index.samples.find(({ name }) => name === clip.name);
    const scale = lane.difference ? roundUp(clip.differences[lane.track].peak * lane.gain) : roundUp(sample.peak);
    const y = (value) => middle - (value / scale) * (middle - 3);
    context.strokeStyle = context.fillStyle = ink;
    context.globalAlpha = 0.25;
    context.fillRect(0, Math.round(middle), width, 1);
    context.globalAlpha = 1;
    context.fillStyle = context.strokeStyle = lane.difference ? index.differenceColour : this.tracks[lane.track].colour;
    const columns = Math.max(1, Math.round(width)), begin = this.from * rate, end = this.to * rate;
    if ((end - begin) / columns < 1) { // single samples
      context.lineWidth = 1.5;
      context.beginPath();
      for (let i = Math.max(0, Math.floor(begin)); i <= Math.min(end + 1, lane.samples.length - 1); i++) {
        const value = lane.gain * (lane.samples[i] - (lane.reference ? lane.reference[i] : 0)), x = ((i - begin) / (end - begin)) * width;
        context.lineTo(x, y(value));
        if ((end - begin) / columns < 0.2 || lane.samples.length < 2) context.fillRect(x - 2, y(value) - 2, 4, 4);
      }
      context.stroke();
    } else {
      const { low, high } = this.envelope(lane).over(begin, end, columns);
      for (let x = 0; x < columns; x++) {
        if (Number.isNaN(low[x])) continue;
        const top = y(high[x] * lane.gain);
        context.fillRect(x, top, 1, Math.max(y(low[x] * lane.gain) - top, 1));
      }
    }
    this.drawAxis(context, width, height, axis, ink);
    const gain = `${clip.differences[lane.track].gain_db} dB`.replace("-", "−");
    this.label(context, `±${Number(scale.toPrecision(2))} of full scale${lane.difference ? `, after ${gain} of gain` : ""}`, 6, 13, ink);
  }

  envelope(lane) {
    const { clip } = this.session;
    if (!lane.difference) return clip.envelopes[lane.track];
    clip.differenceEnvelopes ??= {};
    return (clip.differenceEnvelopes[lane.track] ??= new Envelope(lane.samples.map((value, i) => value - lane.reference[i])));
  }

  label(context, text, x, y, ink) {
    context.font = "11px system-ui, sans-serif";
    context.strokeStyle = getComputedStyle(this.root).backgroundColor;
    context.lineWidth = 4;
    context.lineJoin = "round";
    context.strokeText(text, x, y); // a halo, over whatever is there
    context.globalAlpha = 0.9;
    context.fillStyle = ink;
    context.fillText(text, x, y);
    context.globalAlpha = 1;
  }

  drawAxis(context, width, height, axis, ink) {
    const { clip, index } = this.session;
    const step = tickStep(this.to - this.from, Math.max(2, width / 70)), x = (seconds) => ((seconds - this.from) / (this.to - this.from)) * width;
    context.fillStyle = ink;
    context.font = "11px system-ui, sans-serif";
    for (let at = Math.ceil(this.from / step) * step; at <= this.to; at += step) {
      context.globalAlpha = 0.35;
      context.fillRect(Math.round(x(at)), height - axis, 1, 4);
      const text = clock(at, step), wide = context.measureText(text).width;
      context.globalAlpha = 0.85;
      if (x(at) + 3 + wide < width - 12) context.fillText(text, x(at) + 3, height - 5);
    }
    context.fillText("s", width - 9, height - 5);
    const seams = index.samples.find(({ name }) => name === clip.name).seams;
    const visible = seams.map((seam) => x(seam / index.sampleRate)).filter((at) => at >= 0 && at <= width);
    context.globalAlpha = 0.7;
    for (const at of visible) {
      for (let top = 0; top < height - axis; top += 6) context.fillRect(Math.round(at), top, 1, 3);
      context.beginPath();
      context.moveTo(at - 4, 0);
      context.lineTo(at + 5, 0);
      context.lineTo(at + 0.5, 6);
      context.fill();
    }
    context.globalAlpha = 1;
    if (visible.length) {
      const text = "▾ chunk seams", wide = context.measureText(text).width;
      this.label(context, text, width - wide - 6, height - axis - 6, ink);
    }
  }

  // In slices, so that a key is answered at once while a picture is being made.
  drawSpectrum() {
    clearTimeout(this.slice);
    const { context, width, height } = fit(this.spectrum), lane = this.lane(), rate = this.session.index.sampleRate;
    const columns = Math.max(1, Math.round(width)), rows = Math.max(1, Math.round(height)), per = (this.to - this.from) / columns, ratio = window.devicePixelRatio || 1;
    const slice = 160, canvas = new OffscreenCanvas(slice, rows), ink = canvas.getContext("2d");
    context.fillStyle = "rgb(9 8 22)";
    context.fillRect(0, 0, width, height);
    context.imageSmoothingEnabled = ratio % 1 !== 0;
    const labels = () => {
      context.font = "11px system-ui, sans-serif";
      for (const khz of [rate / 2000].flatMap((top) => [0.25, 0.5, 0.75].map((share) => share * top))) {
        const y = height * (1 - khz / (rate / 2000));
        context.fillStyle = "rgb(255 255 255 / 0.25)";
        context.fillRect(0, y, 5, 1);
        context.fillStyle = "rgb(255 255 255 / 0.9)";
        context.fillText(`${Number(khz.toFixed(2))} kHz`, 8, y + 4);
      }
      const text = `${String(FLOOR_DB).replace("-", "−")} … ${String(CEILING_DB).replace("-", "−")} dBFS`;
      context.fillText(text, width - context.measureText(text).width - 6, 14);
    };
    const step = (at) => {
      const wide = Math.min(slice, columns - at), begin = (this.from + at * per) * rate;
      ink.putImageData(spectrogram(lane.samples, begin, begin + wide * per * rate, wide, rows, lane.gain, lane.reference), 0, 0);
      context.drawImage(canvas, 0, 0, wide, rows, at, 0, (wide * width) / columns, height);
      if (at + slice < columns) this.slice = setTimeout(() => step(at + slice), 0);
      else labels();
    };
    step(0);
  }

  drawOverview() {
    const { context, width, height } = fit(this.overview), lane = this.lane(), { ink, accent } = this.ink();
    const columns = Math.max(1, Math.round(width)), { low, high } = this.envelope(lane).over(0, this.duration * this.session.index.sampleRate, columns);
    let most = 0;
    for (let x = 0; x < columns; x++) most = Math.max(most, -low[x] || 0, high[x] || 0);
    context.fillStyle = ink;
    context.globalAlpha = 0.45;
    const half = height / 2;
    for (let x = 0; x < columns; x++) {
      if (Number.isNaN(low[x])) continue;
      const top = half - (high[x] / (most || 1)) * (half - 2);
      context.fillRect(x, top, 1, Math.max(half - (low[x] / (most || 1)) * (half - 2) - top, 1));
    }
    context.globalAlpha = 1;
    if (this.to - this.from >= this.duration) return;
    const [a, b] = [this.from, this.to].map((seconds) => (seconds / this.duration) * width);
    context.globalAlpha = 0.16;
    context.fillStyle = accent;
    context.fillRect(a, 0, b - a, height);
    context.globalAlpha = 1;
    context.strokeStyle = accent;
    context.lineWidth = 1.5;
    context.strokeRect(a + 0.75, 0.75, Math.max(b - a - 1.5, 1), height - 1.5);
  }

  drawOverlay() {
    if (!this.session.clip || !this.timeline.clientWidth) return;
    const { context, width, height } = fit(this.overlay), { accent } = this.ink();
    const x = (seconds) => ((seconds - this.from) / (this.to - this.from)) * width, at = this.engine.position;
    const region = this.dragged ?? this.engine.region;
    if (region) {
      const [a, b] = region.map(x);
      context.fillStyle = accent;
      context.globalAlpha = 0.2;
      context.fillRect(a, 0, b - a, height);
      context.globalAlpha = 1;
      for (const [edge, way] of [[a, 1], [b, -1]]) {
        context.fillRect(Math.round(edge) - 1, 0, 2, height);
        context.fillRect(Math.round(edge) - (way > 0 ? 0 : 7), 0, 7, 9); // flags: which side is inside
      }
    }
    context.fillStyle = "#fff";
    context.fillRect(Math.round(x(at)) - 1, 0, 3, height);
    context.fillStyle = "#d1416a";
    context.fillRect(Math.round(x(at)), 0, 1, height);
    const duration = this.duration, text = `${clock(at)} s of ${clock(duration)} s`;
    this.time.textContent = text + (region ? ` · region ${clock(region[0])} to ${clock(region[1])} s` : "");
    const aria = { "aria-valuemin": 0, "aria-valuemax": duration.toFixed(3), "aria-valuenow": at.toFixed(3), "aria-valuetext": text };
    for (const [name, value] of Object.entries(aria)) this.timeline.setAttribute(name, value);
  }

  drawLevels(now) {
    const { peak, rms } = this.engine.levels(), share = (level) => Math.max(0, Math.min(1, 1 + (20 * Math.log10(level || 1e-9)) / 60));
    if (peak >= this.held.peak || now > this.held.until || !this.engine.isPlaying) this.held = { peak, until: now + 1500 };
    this.meterRms.style.width = `${100 * share(rms)}%`;
    this.meterPeak.style.left = `${100 * share(this.held.peak)}%`;
    this.meterPeak.hidden = this.held.peak <= 0;
    this.meter.setAttribute("aria-valuenow", String(Math.round(Math.max(-60, 20 * Math.log10(peak || 1e-9)))));
    this.levels.textContent = `peak ${decibels(this.held.peak)} · RMS ${decibels(rms)}`;
  }
}
