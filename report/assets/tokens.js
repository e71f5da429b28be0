// A step's bytes (format: report/blobs.py) as trajectories, and token lines as elements.

// Thousandths of a nat: where the four tints begin.
const SURPRISE = [50, 300, 1000, 2500];
const ENTROPY = [100, 500, 1000, 2000];
const UNKNOWN = 65535;

function readStep(buffer) {
  const size = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const total = header.rows.reduce((sum, row) => sum + row[2], 0);
  const Places = header.wide === 2 ? Uint16Array : Uint32Array;
  const places = new Places(buffer, 4 + size, total);
  const surprise = new Uint16Array(buffer, 4 + size + header.wide * total, total);
  const entropy = new Uint16Array(buffer, 4 + size + (header.wide + 2) * total, total);
  let start = 0;
  return header.rows.map(([prompt, sample, length, stop, answer, reward, reason, advantage, turns, correct], index) => {
    const row = {
      index, prompt, sample, stop, answer, reward, reason, advantage, correct,
      turns: turns.map(([from, to, ended, calls]) => ({ from, to, ended,
        calls: calls.map(([name, args, status, text, seconds]) => ({ name, args, status, text, seconds })) })),
      places: places.subarray(start, start + length), surprise: surprise.subarray(start, start + length),
      entropy: entropy.subarray(start, start + length),
    };
    start += length;
    return row;
  });
}

class Vocabulary {
  constructor({ ids, bytes, added }) {
    this.ids = ids;
    this.added = new Set(added);
    this.bytes = bytes.map((text) => Uint8Array.from(text, (char) => char.charCodeAt(0)));
  }

  // Text of each token of [from, to): a character that several tokens split stands with the last of them.
  texts(places, from, to) {
    const decoder = new TextDecoder();
    const texts = [];
    for (let i = from; i < to; i++) texts.push(decoder.decode(this.bytes[places[i]], { stream: true }));
    if (texts.length) texts[texts.length - 1] += decoder.decode();
    return texts;
  }

  // What the prompt asks: its last stretch between control tokens that is longer than a header.
  question(row) {
    const end = row.turns[0].from;
    const texts = this.texts(row.places, 0, end);
    const parts = [""];
    texts.forEach((text, i) => (this.added.has(row.places[i]) ? parts.push("") : (parts[parts.length - 1] += text)));
    const long = parts.map((part) => part.trim()).filter((part) => part.length > 12);
    return (long.pop() || texts.join("")).replace(/^user\s+/, "").trim();
  }
}

function tokenLine(row, vocabulary, from, to, sampled, label) {
  const line = make("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": `${label}; arrow keys read its tokens` });
  vocabulary.texts(row.places, from, to).forEach((text, i) => {
    const place = from + i;
    const surprise = row.surprise[place];
    const kinds = ["t", sampled ? "s" : "a"];
    if (vocabulary.added.has(row.places[place])) kinds.push("c");
    if (text.startsWith("\n")) kinds.push("n");
    const tint = SURPRISE.filter((edge) => surprise > edge).length;
    if (sampled && tint) kinds.push(`l${tint}`);
    const doubt = row.entropy[place] === UNKNOWN ? 0 : ENTROPY.filter((edge) => row.entropy[place] > edge).length;
    if (doubt) kinds.push(`e${doubt}`);
    const token = make("span", { class: kinds.join(" "), text });
    token.place = place;
    line.append(token);
  });
  line.row = row;
  return line;
}

function describeToken(row, vocabulary, place) {
  const id = vocabulary.ids[row.places[place]];
  const text = JSON.stringify(new TextDecoder().decode(vocabulary.bytes[row.places[place]]));
  const turn = row.turns.findIndex((t) => place >= t.from && place < t.to);
  if (turn < 0) return `${text}  id ${id}  token ${place}  not sampled, not trained`;
  const logprob = row.surprise[place] / 1000;
  const share = 100 * Math.exp(-logprob);
  const advantage = row.advantage === null ? "none" : number(row.advantage);
  const entropy = row.entropy[place] === UNKNOWN ? "not recorded" : `${number(row.entropy[place] / 1000)} nats`;
  return `${text}  id ${id}  token ${place}  turn ${turn + 1}  log-probability ${number(logprob ? -logprob : 0)} ` +
    `(${number(share)} %)  entropy ${entropy}  advantage ${advantage}`;
}
