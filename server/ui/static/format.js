/** Formats numbers, sizes, times and texts for the page. Knows no view. */

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Return a number of bytes with a binary unit: 1536 -> "1.5 KiB". */
export function formatBytes(bytes) {
  if (bytes == null) return "–";
  let unit = 0;
  while (Math.abs(bytes) >= 1024 && unit < UNITS.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? Math.round(bytes) : toPrecision(bytes, 3)} ${UNITS[unit]}`;
}

/** Return a number with separators of thousands, and few digits after the point. */
export function formatNumber(value, digits = 3) {
  if (value == null || Number.isNaN(value)) return "–";
  return Number.isInteger(value) ? value.toLocaleString("en") : toPrecision(value, digits);
}

/** Return seconds in a unit that fits: 0.0123 -> "12.3 ms", 75 -> "1 min 15 s". */
export function formatSeconds(seconds) {
  if (seconds == null || Number.isNaN(seconds)) return "–";
  if (seconds < 1) return `${toPrecision(seconds * 1000, 3)} ms`;
  if (seconds < 60) return `${toPrecision(seconds, 3)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** Return a share from 0 to 1 in percent. */
export function formatPercent(share) {
  return share == null || Number.isNaN(share) ? "–" : `${toPrecision(share * 100, 3)} %`;
}

function toPrecision(value, digits) {
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumSignificantDigits: digits });
}

// Control characters, which terminals would obey, and marks that change the direction of the text around them
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g;

/** Return a text in which characters that change how other text looks are replaced by their names or pictures. */
export function showHidden(text) {
  return text.replace(HIDDEN, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}
