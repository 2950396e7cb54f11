// The request as code that does the same: a curl line and a Python program. The key stays out of both.

/** {curl, python} of a `request` ({path, body}) to the server at `origin`. `keyed`: it needs a key. */
export function snippets({ path, body }, origin, keyed) {
  return { curl: curl(path, body, origin, keyed), python: python(path, body, origin, keyed) };
}

function curl(path, body, origin, keyed) {
  const lines = [`curl -N ${origin}${path}`, "-H 'Content-Type: application/json'"];
  if (keyed) lines.push('-H "Authorization: Bearer $SLUICE_API_KEY"');
  lines.push(`-d ${quoted(JSON.stringify({ ...body, stream: true }, null, 2))}`);
  return lines.join(" \\\n  ");
}

/** As one word of a POSIX shell. */
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function python(path, body, origin, keyed) {
  const chat = path.includes("/chat/");
  const key = keyed ? 'os.environ["SLUICE_API_KEY"]' : '"none"';
  const fields = Object.entries({ ...body, stream: true }).map(([name, value]) => `    ${name}=${literal(value)},`);
  return [
    ...(keyed ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(`${origin}/v1`)}, api_key=${key})`,
    `stream = client.${chat ? "chat.completions" : "completions"}.create(`,
    ...fields,
    ")",
    "for chunk in stream:",
    "    for choice in chunk.choices:",
    `        print(${chat ? 'choice.delta.content or ""' : "choice.text"}, end="", flush=True)`,
    "",
  ].join("\n");
}

/** A JSON value in Python. Strings of JSON are strings of Python too. */
function literal(value) {
  if (value === true) return "True";
  if (value === false) return "False";
  if (value === null) return "None";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item)}`).join(", ")}}`;
  return JSON.stringify(value);
}
