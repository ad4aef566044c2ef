// Colours: those of the style sheet and theme, and one for each request.

const dark = matchMedia("(prefers-color-scheme: dark)");
const requestColours = new Map();

/** Returns a colour of the style sheet by the name of its custom property. */
export function themeColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** Returns the colour of a sequence's request. Requests have consecutive numbers; the golden angle keeps their hues apart. */
export function requestColour(key) {
  const request = parseInt(key, 10);
  let colour = requestColours.get(request);
  if (colour === undefined) {
    const hue = ((request * 137.508) % 360).toFixed(0);
    colour = dark.matches ? `oklch(0.72 0.14 ${hue})` : `oklch(0.62 0.16 ${hue})`;
    if (requestColours.size > 5000) requestColours.clear();
    requestColours.set(request, colour);
  }
  return colour;
}

/** Calls `callback` when the theme changes. */
export function onThemeChange(callback) {
  dark.addEventListener("change", () => {
    requestColours.clear();
    callback();
  });
}
