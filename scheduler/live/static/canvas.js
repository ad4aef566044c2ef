// Sizes canvases: sharp on every screen, and within the limits of browsers.

const MAX_PIXELS = 12e6;
const MAX_SIDE = 16000;

/** Sizes a canvas in CSS pixels and clears it. Returns its context, which takes CSS pixels too. */
export function fit(canvas, width, height) {
  const ratio = Math.min(devicePixelRatio, Math.sqrt(MAX_PIXELS / (width * height)), MAX_SIDE / height);
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(canvas.width / width, 0, 0, canvas.height / height, 0, 0);
  return context;
}
