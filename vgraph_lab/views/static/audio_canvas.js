// Waveforms, spectrograms and the pointer on a canvas. Levels are drawn on fixed scales, so that tracks can be compared.

const BLOCK = 256; // samples per entry of the coarse envelope

// Lowest and highest sample of each of `columns` equal pieces of [from, to), in samples.
export class Envelope {
  constructor(samples) {
    this.samples = samples;
  }

  over(from, to, columns) {
    const low = new Float32Array(columns), high = new Float32Array(columns);
    const step = (to - from) / columns;
    const coarse = step >= 4 * BLOCK ? this.#coarse() : null;
    for (let column = 0; column < columns; column++) {
      const begin = Math.floor(from + column * step);
      const end = Math.max(Math.floor(from + (column + 1) * step), begin + 1);
      let least = Infinity, most = -Infinity;
      const [a, b, lows, highs] = coarse
        ? [Math.floor(begin / BLOCK), Math.ceil(end / BLOCK), coarse.low, coarse.high]
        : [begin, end, this.samples, this.samples];
      for (let i = Math.max(a, 0); i < Math.min(b, lows.length); i++) {
        if (lows[i] < least) least = lows[i];
        if (highs[i] > most) most = highs[i];
      }
      [low[column], high[column]] = least <= most ? [least, most] : [NaN, NaN];
    }
    return { low, high };
  }

  #coarse() {
    if (this.blocks) return this.blocks;
    const count = Math.ceil(this.samples.length / BLOCK);
    this.blocks = { low: new Float32Array(count).fill(Infinity), high: new Float32Array(count).fill(-Infinity) };
    for (let i = 0, { low, high } = this.blocks; i < this.samples.length; i++) {
      const block = (i / BLOCK) | 0, value = this.samples[i];
      if (value < low[block]) low[block] = value;
      if (value > high[block]) high[block] = value;
    }
    return this.blocks;
  }
}

// Power of a real frame at bins 0 … size/2: radix-2, decimation in time, tables made once.
export class Spectrum {
  constructor(size) {
    this.size = size;
    this.window = Float32Array.from({ length: size }, (_, i) => 0.5 - 0.5 * Math.cos((2 * Math.PI * i) / size)); // Hann
    this.scale = 2 / this.window.reduce((sum, value) => sum + value, 0); // a sine of amplitude 1 gives power 1
    this.cosine = Float32Array.from({ length: size / 2 }, (_, i) => Math.cos((2 * Math.PI * i) / size));
    this.sine = Float32Array.from({ length: size / 2 }, (_, i) => -Math.sin((2 * Math.PI * i) / size));
    const bits = Math.log2(size);
    this.order = Uint16Array.from({ length: size }, (_, i) => {
      let reversed = 0;
      for (let bit = 0; bit < bits; bit++) reversed |= ((i >> bit) & 1) << (bits - 1 - bit);
      return reversed;
    });
    this.re = new Float32Array(size);
    this.im = new Float32Array(size);
    this.power = new Float32Array(size / 2 + 1);
  }

  // The frame whose middle is sample `centre`; outside the clip there is silence. With a gain, of the amplified samples;
  // with a reference, of the difference from it.
  at(samples, centre, gain = 1, reference = null) {
    const { size, re, im, order, window, cosine, sine, power } = this;
    const start = Math.round(centre) - size / 2;
    for (let i = 0; i < size; i++) {
      const from = start + order[i];
      const value = from >= 0 && from < samples.length ? samples[from] - (reference ? reference[from] : 0) : 0;
      re[i] = value * window[order[i]];
      im[i] = 0;
    }
    for (let half = 1; half < size; half *= 2) {
      const stride = size / (2 * half);
      for (let group = 0; group < size; group += 2 * half) {
        for (let k = 0, t = 0; k < half; k++, t += stride) {
          const a = group + k, b = a + half;
          const x = re[b] * cosine[t] - im[b] * sine[t], y = re[b] * sine[t] + im[b] * cosine[t];
          re[b] = re[a] - x;
          im[b] = im[a] - y;
          re[a] += x;
          im[a] += y;
        }
      }
    }
    const factor = (this.scale * gain) ** 2;
    for (let bin = 0; bin <= size / 2; bin++) power[bin] = (re[bin] * re[bin] + im[bin] * im[bin]) * factor;
    return power;
  }
}

export const FLOOR_DB = -110;
export const CEILING_DB = -20;
const FRAME = 1024;
const FRAMES_PER_COLUMN = 3;

// Dark to bright with even steps of lightness, so that levels read in grey, too.
const STOPS = [[9, 8, 22], [45, 22, 92], [112, 31, 112], [181, 54, 91], [232, 100, 57], [250, 172, 62], [252, 243, 186]];
export const PALETTE = Uint8ClampedArray.from({ length: 256 * 3 }, (_, i) => {
  const along = (Math.floor(i / 3) / 255) * (STOPS.length - 1), stop = Math.min(Math.floor(along), STOPS.length - 2);
  return STOPS[stop][i % 3] + (along - stop) * (STOPS[stop + 1][i % 3] - STOPS[stop][i % 3]);
});

let shared = null;

// Pixels [columns × rows] of [from, to); rows from 0 Hz (bottom) to half the sample rate.
export function spectrogram(samples, from, to, columns, rows, gain = 1, reference = null) {
  const spectrum = (shared ??= new Spectrum(FRAME));
  const image = new ImageData(columns, rows);
  const step = (to - from) / columns, bins = FRAME / 2;
  const frames = Math.max(1, Math.min(FRAMES_PER_COLUMN, Math.round(step / (FRAME / 2))));
  const most = new Float32Array(bins + 1);
  for (let column = 0; column < columns; column++) {
    most.fill(0);
    for (let frame = 0; frame < frames; frame++) {
      const power = spectrum.at(samples, from + (column + (frame + 0.5) / frames) * step, gain, reference);
      for (let bin = 0; bin <= bins; bin++) if (power[bin] > most[bin]) most[bin] = power[bin];
    }
    for (let row = 0; row < rows; row++) {
      const low = ((rows - 1 - row) / rows) * bins, high = Math.max(low + 1, ((rows - row) / rows) * bins);
      let level = 0;
      for (let bin = Math.floor(low); bin < high; bin++) if (most[bin] > level) level = most[bin];
      const share = (10 * Math.log10(level + 1e-20) - FLOOR_DB) / (CEILING_DB - FLOOR_DB);
      const colour = 3 * Math.max(0, Math.min(255, Math.round(255 * share)));
      const pixel = 4 * (row * columns + column);
      for (let part = 0; part < 3; part++) image.data[pixel + part] = PALETTE[colour + part];
      image.data[pixel + 3] = 255;
    }
  }
  return image;
}

export const roundUp = (level) => {
  if (!(level > 0)) return 1;
  const decade = 10 ** Math.floor(Math.log10(level));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * decade).find((step) => step >= level * (1 - 1e-9));
};

// Distance of the ticks on an axis of this many seconds.
export const tickStep = (seconds, ticks) => [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300]
  .find((step) => seconds / step <= ticks) ?? 600;

export function clock(seconds, step = 0.01) {
  const digits = step >= 1 ? 0 : step >= 0.1 ? 1 : step >= 0.01 ? 2 : 3;
  if (seconds < 60) return seconds.toFixed(digits);
  const minutes = Math.floor(seconds / 60), rest = (seconds - 60 * minutes).toFixed(digits);
  return `${minutes}:${rest.padStart(digits ? digits + 3 : 2, "0")}`;
}

// A canvas that fits its box, sharp on any screen. Gives its context and its size in CSS pixels.
export function fit(canvas) {
  const { width, height } = canvas.getBoundingClientRect(), ratio = window.devicePixelRatio || 1;
  const [w, h] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

// Clicks, drags, wheels and pinches on an element that shows [view.from, view.to] seconds.
// on: {seek(s), region([a, b] | null, isFinal), zoom(factor, s), pan(s)}; returns a function that lets go of everything.
export function followPointer(element, view, region, on) {
  const signal = new AbortController();
  const listen = (type, handler, options) => element.addEventListener(type, handler, { signal: signal.signal, ...options });
  const secondsAt = (event) => {
    const box = element.getBoundingClientRect();
    return view().from + ((event.clientX - box.left) / Math.max(box.width, 1)) * (view().to - view().from);
  };
  const pixels = (seconds) => (seconds * element.getBoundingClientRect().width) / (view().to - view().from);
  let drag = null;
  listen("pointerdown", (event) => {
    if (event.button !== 0) return;
    const at = secondsAt(event), now = region();
    const edge = now?.findIndex((end) => Math.abs(pixels(end - at)) < 6) ?? -1;
    drag = { x: event.clientX, anchor: edge >= 0 ? now[1 - edge] : at, moved: edge >= 0 };
    element.setPointerCapture(event.pointerId);
  });
  listen("pointermove", (event) => {
    const near = region()?.some((end) => Math.abs(pixels(end - secondsAt(event))) < 6);
    element.style.cursor = near ? "ew-resize" : "";
    if (!drag) return;
    if (Math.abs(event.clientX - drag.x) > 4) drag.moved = true;
    if (drag.moved) on.region(ordered(drag.anchor, secondsAt(event)), false);
  });
  listen("pointerup", (event) => {
    if (!drag) return;
    const { moved, anchor } = drag;
    drag = null;
    if (moved) on.region(ordered(anchor, secondsAt(event)), true);
    else on.seek(secondsAt(event));
  });
  listen("pointercancel", () => (drag = null));
  listen("dblclick", () => on.region(null, true));
  listen("wheel", (event) => {
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey;
    if (event.ctrlKey || event.metaKey) on.zoom?.(Math.exp(event.deltaY * 0.004), secondsAt(event));
    else if (isSideways) on.pan?.((((event.deltaX || event.deltaY) / 600) * (view().to - view().from)));
    else return; // the page scrolls
    event.preventDefault();
  }, { passive: false });
  return () => signal.abort();
}

const ordered = (a, b) => (a < b ? [a, b] : [b, a]);

// An element with attributes, listeners (on…) and children. Every control keeps JupyterLab's shortcuts (d d deletes a cell) away.
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  if (["button", "select", "input"].includes(tag) || "tabindex" in attributes) element.setAttribute("data-lm-suppress-shortcuts", "true");
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function decibels(amplitude) {
  return amplitude > 0 ? `${(20 * Math.log10(amplitude)).toFixed(1)} dBFS`.replace("-", "−") : "−∞ dBFS";
}
