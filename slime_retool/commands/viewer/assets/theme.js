"use strict";
// In the head, so that the first picture has its colours: the system's, until the button chooses.
(() => {
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const follow = () => (root.dataset.theme = dark.matches ? "dark" : "light");
  follow();
  dark.addEventListener("change", follow);
  document.addEventListener("click", (event) => {
    if (!event.target.closest("#theme")) return;
    dark.removeEventListener("change", follow);
    root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  });
})();
