// Numbers, durations and addresses as text.

const UNITS = ["", "k", "M", "G", "T", "P"];

/** At most three digits with a unit: 12.3k. */
export function scaled(value) {
  if (value === null || value === undefined) return "–";
  let unit = 0;
  while (Math.abs(value) >= 1000 && unit < UNITS.length - 1) { value /= 1000; unit += 1; }
  const digits = unit === 0 ? (value < 10 && value % 1 ? 1 : 0) : value < 100 ? 1 : 0;
  return value.toFixed(digits) + UNITS[unit];
}

/** Bytes per second. */
export const bytes = (value) => (value === null || value === undefined ? "–" : `${scaled(value)}B`);

/** A whole number with separators. */
export const whole = (value) => (value ?? 0).toLocaleString("en");

export const percent = (share) => `${share >= 0.0995 || share === 0 ? Math.round(share * 100) : (share * 100).toFixed(1)}%`;

/** Seconds in at most two units: 1h05m. */
export function duration(seconds) {
  const [days, hours, minutes] = [Math.floor(seconds / 86400), Math.floor(seconds / 3600) % 24, Math.floor(seconds / 60) % 60];
  if (days) return `${days}d${String(hours).padStart(2, "0")}h`;
  if (hours) return `${hours}h${String(minutes).padStart(2, "0")}m`;
  if (minutes) return `${minutes}m${String(Math.floor(seconds % 60)).padStart(2, "0")}s`;
  return `${Math.floor(seconds)}s`;
}

/** A short time: 300ms, 1.5s. */
export const milliseconds = (time) => (time < 1000 ? `${time}ms` : `${time / 1000}s`);

/** How long ago a time of the server was. */
export const ago = (time) => (time ? `${duration(Math.max(0, (Date.now() - Date.parse(time)) / 1000))} ago` : "never");

export const socket = (address, port) => (address.includes(":") ? `[${address}]:${port}` : `${address}:${port}`);
