// Zooms the pool: by buttons, by the keys + - 0 and W, by Ctrl and the wheel, and by two fingers.

const WHEEL_STEP = 40; // px of scrolling for one size
const PINCH_STEP = 1.25; // ratio of distances for one size

/** Connects the controls, found by id, and the canvas with the grid. */
export function attachZoom(grid, canvas, find) {
  const whole = find("pool-whole");
  const actions = {
    "+": () => grid.zoom(1),
    "-": () => grid.zoom(-1),
    0: () => grid.fit(),
    w: () => {
      grid.showWhole(!grid.isWhole);
      whole.setAttribute("aria-pressed", grid.isWhole);
    },
  };
  find("pool-larger").addEventListener("click", actions["+"]);
  find("pool-smaller").addEventListener("click", actions["-"]);
  find("pool-fit").addEventListener("click", actions[0]);
  whole.addEventListener("click", actions.w);
  canvas.addEventListener("keydown", (event) => {
    const action = actions[event.key === "=" ? "+" : event.key.toLowerCase()];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
  });
  attachWheel(grid, canvas);
  attachPinch(grid, canvas);
}

// Browsers report a pinch on a touchpad as a wheel with Ctrl. The wheel alone scrolls, as everywhere on the page.
function attachWheel(grid, canvas) {
  let turned = 0;
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    turned += event.deltaY;
    if (Math.abs(turned) < WHEEL_STEP) return;
    grid.zoom(turned < 0 ? 1 : -1);
    turned = 0;
  }, { passive: false });
}

function attachPinch(grid, canvas) {
  let distance = 0;
  const between = ([one, other]) => Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY);
  canvas.addEventListener("touchstart", ({ touches }) => {
    if (touches.length === 2) distance = between(touches);
  }, { passive: true });
  canvas.addEventListener("touchmove", (event) => {
    if (event.touches.length !== 2) return;
    event.preventDefault();
    const now = between(event.touches);
    if (now < distance * PINCH_STEP && now > distance / PINCH_STEP) return;
    grid.zoom(now > distance ? 1 : -1);
    distance = now;
  }, { passive: false });
}
