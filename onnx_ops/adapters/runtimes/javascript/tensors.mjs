// Tensors as bytes: little-endian values one after the other; texts as a JSON list.

const ARRAYS = {
  bool: Uint8Array,
  float16: Uint16Array,
  float32: Float32Array,
  float64: Float64Array,
  int16: Int16Array,
  int32: Int32Array,
  int64: BigInt64Array,
  int8: Int8Array,
  uint16: Uint16Array,
  uint32: Uint32Array,
  uint64: BigUint64Array,
  uint8: Uint8Array,
};

export function decoded(type, bytes) {
  if (type === "string") return JSON.parse(new TextDecoder().decode(bytes));
  const kind = ARRAYS[type];
  const own = new Uint8Array(bytes).slice(); // a copy, whose start is aligned for the type
  return new kind(own.buffer, 0, own.byteLength / kind.BYTES_PER_ELEMENT);
}

export function encoded(tensor) {
  if (tensor === undefined || tensor.data === undefined) throw new Error("an output is not a tensor");
  if (tensor.type === "string") return new TextEncoder().encode(JSON.stringify(tensor.data));
  if (!(tensor.type in ARRAYS)) throw new Error(`an output is of type ${tensor.type}, which is not supported`);
  const { buffer, byteOffset, byteLength } = tensor.data;
  return new Uint8Array(buffer, byteOffset, byteLength);
}
