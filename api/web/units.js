// Numbers as people read them.

/** 1,234 */
export const count = (number) => number.toLocaleString("en");

/** A duration in seconds: 12.3 ms, 1.23 s, 2 min 5 s. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${(value * 1000).toPrecision(value < 0.01 ? 2 : 3)} ms`;
  return value < 60 ? `${value.toPrecision(3)} s` : ago(value);
}

/** A length of time to the second: 5 s, 2 min 5 s, 1 h 3 min. */
export function ago(value) {
  const whole = Math.floor(value);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}
