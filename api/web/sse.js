// Server-sent events of a fetch response. (EventSource can send neither a key nor a body.)

/** The events of `response` as they come: {data, id, event}, or {comment}. Ends with the body.
 *  The format: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = {};
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith(":")) {
          yield { comment: line.slice(1).trim() };
        } else if (line) {
          const [, name, text] = /^([^:]*):? ?(.*)$/s.exec(line);
          event[name] = name === "data" && "data" in event ? `${event.data}\n${text}` : text;
        } else {
          if ("data" in event) yield event;
          event = {};
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
