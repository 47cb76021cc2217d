//! The kernels that are measured, and their shapes.

use std::convert::Infallible;

use refrain_kernels::{Attention, Buffer, Cpu, Dtype, Linear, Precision, Q4Block, WeightRows, softmax};

use crate::activations::Activations;

/// Tokens in the KV cache of the attention cases.
const KEYS: usize = 4096;

/// A group of kernels, as `--only` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Group {
    /// Matrix and vector products
    Products,
    /// Attention and what methods ask of it
    Attention,
    /// Normalisation, rotation, placing of keys, softmax
    Ops,
}

/// A kernel at one shape.
pub(crate) struct Case {
    pub(crate) group: Group,
    /// The first column of the table, and the colour of the picture.
    pub(crate) kernel: &'static str,
    pub(crate) shape: String,
    /// Multiplications and additions of a call.
    pub(crate) operations: f64,
    /// Whether the kernel may multiply in `bf16`; otherwise it multiplies in `f32`.
    pub(crate) bf16: bool,
    /// Whether the kernel runs on the calling thread alone.
    pub(crate) one_thread: bool,
    /// Bytes that one call touches, roughly.
    pub(crate) size: usize,
    prepare: Prepare,
}

/// Allocates the operands of a case. Cases of one row rotate through this many bytes of operands, so that no call finds
/// its own in a cache.
type Prepare = Box<dyn Fn(&Cpu, usize) -> Prepared>;

/// A case with its operands in memory.
pub(crate) struct Prepared {
    /// Bytes that a call reads, each counted once.
    pub(crate) read: usize,
    /// Bytes that a call writes, each counted once.
    pub(crate) written: usize,
    /// Bytes of all operands that calls rotate through.
    pub(crate) span: usize,
    pub(crate) call: Box<dyn FnMut(&Cpu)>,
}

impl Case {
    pub(crate) fn prepare(&self, cpu: &Cpu, rotation: usize) -> Prepared {
        (self.prepare)(cpu, rotation)
    }
}

/// All cases, in the order of the table.
pub(crate) fn cases() -> Vec<Case> {
    let mut all = Vec::new();
    let many = [(2048, 576, 1536), (32, 4096, 14336), (256, 4096, 14336), (2048, 4096, 14336)];
    let one = [(1, 4096, 14336), (1, 576, 1536), (1, 576, 49152)];
    for shapes in [&many[..], &one] {
        for weights in Weights::ALL {
            all.extend(shapes.iter().map(|shape| product(weights, *shape)));
        }
    }
    for precision in [Precision::Bf16, Precision::F32] {
        for heads in [Heads { query: 9, kv: 3, width: 64 }, Heads { query: 12, kv: 2, width: 128 }] {
            all.extend([4096, 614, 32, 1].map(|rows| attention(precision, heads, rows)));
        }
    }
    all.extend([concat_logits(), attention_mass()]);
    all.extend([rms_norm(), rope(), place_keys(), softmax_row()]);
    all
}

/// Fixed pseudo-random numbers from −1 to 1 (xorshift64).
pub(crate) fn fill(n: usize) -> Vec<f32> {
    let mut s = 0x2545_f491_4f6c_dd1d_u64;
    let number = |_| {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        (s >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(number).collect()
}

pub(crate) fn buffer(dtype: Dtype, n: usize) -> Buffer {
    let mut buffer = Buffer::zeros(dtype, n);
    buffer.write_f32(0, &fill(n));
    buffer
}

/// Cosines and sines of `tokens` × `half` angles: rotations, so that repeated calls do not shrink their operand.
pub(crate) fn angles(tokens: usize, half: usize) -> [Vec<f32>; 2] {
    let angles = fill(tokens * half);
    [angles.iter().map(|a| a.cos()).collect(), angles.iter().map(|a| a.sin()).collect()]
}

/// Weights of a product.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Weights {
    Bf16,
    /// Blocks of 8 bits.
    Q8,
    /// Blocks of 4 bits, which most files have.
    Q4,
    F32,
}

impl Weights {
    const ALL: [Weights; 4] = [Weights::Bf16, Weights::Q8, Weights::Q4, Weights::F32];

    fn name(self) -> &'static str {
        match self {
            Weights::Bf16 => "bf16",
            Weights::Q8 => "q8",
            Weights::Q4 => "q4",
            Weights::F32 => "f32",
        }
    }

    /// n × k weights, packed. Each row is `row`, in 4 bits as far as they hold it.
    fn pack(self, cpu: &Cpu, n: usize, row: &[f32]) -> Linear {
        let floats = |_, out: &mut [f32]| {
            out.copy_from_slice(row);
            Ok::<(), Infallible>(())
        };
        let blocks = |_, out: &mut [Q4Block]| {
            for (block, row) in out.iter_mut().zip(row.chunks(32)) {
                let mut q = [0; 32];
                q.iter_mut().zip(row).for_each(|(q, x)| *q = ((x + 1.0) * 7.5) as u8);
                *block = Q4Block { scale: 1.0 / 7.5, min: -1.0, q };
            }
            Ok(())
        };
        let precision = match self {
            Weights::Bf16 => Precision::Bf16,
            Weights::Q8 | Weights::Q4 => Precision::Q8,
            Weights::F32 => Precision::F32,
        };
        let rows = if self == Weights::Q4 { WeightRows::Q4(&blocks) } else { WeightRows::F32(&floats) };
        Linear::pack(cpu, precision, n, row.len(), None, rows).unwrap_or_else(|never| match never {})
    }
}

/// The product of m × k by k × n. With one row, calls rotate through several weights.
fn product(of: Weights, (m, k, n): (usize, usize, usize)) -> Case {
    let kernel = match of {
        _ if m == 1 => "vector product",
        Weights::Bf16 => "product bf16",
        Weights::Q8 => "product q8",
        Weights::Q4 => "product q4",
        Weights::F32 => "product f32",
    };
    let shape = format!("{m}×{k}×{n}");
    let prepare = move |cpu: &Cpu, rotation: usize| {
        let row = fill(k);
        let mut weights = vec![of.pack(cpu, n, &row)];
        let bytes = weights[0].bytes();
        let copies = if m == 1 { rotation.div_ceil(bytes) } else { 1 };
        weights.extend((1..copies).map(|_| of.pack(cpu, n, &row)));
        let (x, mut y) = (Activations::new(&fill(m * k)), Activations::new(&vec![0.0; m * n]));
        let mut turn = 0;
        let (read, written) = (bytes + 4 * x.len(), 4 * y.len());
        let call = move |cpu: &Cpu| {
            cpu.linear(&weights[turn], &x, &mut y);
            turn = (turn + 1) % weights.len();
        };
        Prepared { read, written, span: bytes * copies + 4 * m * (k + n), call: Box::new(call) }
    };
    Case {
        group: Group::Products,
        kernel,
        shape: if m == 1 { format!("{} {shape}", of.name()) } else { shape },
        operations: (2 * m * k * n) as f64,
        bf16: of != Weights::F32,
        one_thread: false,
        size: 4 * (m * k + k * n + m * n),
        prepare: Box::new(prepare),
    }
}

#[derive(Clone, Copy)]
struct Heads {
    query: usize,
    kv: usize,
    width: usize,
}

/// Queries of the last `rows` of [`KEYS`] tokens, and one or more copies of the keys and values.
struct Operands {
    heads: Heads,
    q: Activations,
    kv: Vec<[Buffer; 2]>,
    visible: Vec<(u32, u32)>,
}

impl Operands {
    fn new(heads: Heads, rows: usize, copies: usize) -> Operands {
        let kv = [
            buffer(Dtype::F16, heads.kv * KEYS * heads.width),
            buffer(Dtype::F16, heads.kv * KEYS * heads.width),
        ];
        Operands {
            heads,
            q: Activations::new(&fill(rows * heads.query * heads.width)),
            kv: vec![kv; copies],
            visible: visible(rows),
        }
    }

    fn attention(&self, turn: usize, precision: Precision) -> Attention<'_> {
        let [k, v] = &self.kv[turn % self.kv.len()];
        Attention {
            q: &self.q,
            k: k.as_slice(),
            v: v.as_slice(),
            heads: self.heads.query,
            kv_heads: self.heads.kv,
            head_dim: self.heads.width,
            capacity: KEYS,
            visible: &self.visible,
            scale: 1.0 / (self.heads.width as f32).sqrt(),
            precision,
        }
    }
}

/// Ranges of keys that the last `rows` of [`KEYS`] tokens see.
fn visible(rows: usize) -> Vec<(u32, u32)> {
    (KEYS - rows..KEYS).map(|i| (0, i as u32 + 1)).collect()
}

/// Pairs of rows and visible keys.
fn pairs(rows: usize) -> usize {
    visible(rows).iter().map(|(_, end)| *end as usize).sum()
}

/// Causal attention over keys and values in `f16`. With one row, calls rotate through several caches.
fn attention(precision: Precision, heads: Heads, rows: usize) -> Case {
    let Heads { query, kv, width } = heads;
    let stored = 2 * 2 * kv * KEYS * width;
    let prepare = move |_: &Cpu, rotation: usize| {
        let copies = if rows == 1 { rotation.div_ceil(stored) } else { 1 };
        let operands = Operands::new(heads, rows, copies);
        let (mut out, mut turn) = (Activations::new(&vec![0.0; operands.q.len()]), 0);
        let moved = 4 * out.len();
        let call = move |cpu: &Cpu| {
            cpu.attention(&operands.attention(turn, precision), &mut out);
            turn += 1;
        };
        let span = stored * copies + 2 * moved;
        Prepared { read: stored + moved, written: moved, span, call: Box::new(call) }
    };
    Case {
        group: Group::Attention,
        kernel: "attention",
        shape: format!("{precision}, {rows} × {KEYS}, {query}/{kv} heads of {width}"),
        operations: (4 * pairs(rows) * query * width) as f64,
        bf16: precision == Precision::Bf16,
        one_thread: false,
        size: stored + 8 * rows * query * width,
        prepare: Box::new(prepare),
    }
}

const SMALL: Heads = Heads { query: 9, kv: 3, width: 64 };

/// Attention logits of a question's rows; the queries of a KV head's group are added up first.
fn concat_logits() -> Case {
    let (Heads { query, kv, width }, rows) = (SMALL, 60);
    let (read, written) = (4 * rows * query * width + 2 * kv * KEYS * width, 4 * rows * KEYS);
    let prepare = move |_: &Cpu, _| {
        let operands = Operands::new(SMALL, rows, 1);
        let mut z = vec![0.0; rows * KEYS];
        let call = move |cpu: &Cpu| {
            let (q, k) = (&operands.q, operands.kv[0][0].as_slice());
            cpu.concat_logits(q, query, kv, width, k, KEYS, 0..KEYS, 0.125, &mut z);
        };
        Prepared { read, written, span: read + written, call: Box::new(call) }
    };
    Case {
        group: Group::Attention,
        kernel: "attention",
        shape: format!("concat_logits, {rows} × {KEYS}"),
        operations: (2 * rows * KEYS * kv * width + rows * (query - kv) * width) as f64,
        bf16: false,
        one_thread: false,
        size: read + written,
        prepare: Box::new(prepare),
    }
}

/// Attention weights summed over rows, for each key; no values are read.
fn attention_mass() -> Case {
    let (Heads { query, kv, width }, rows) = (SMALL, 614);
    let (read, written) = (4 * rows * query * width + 2 * kv * KEYS * width, 4 * kv * KEYS);
    let prepare = move |_: &Cpu, _| {
        let operands = Operands::new(SMALL, rows, 1);
        let mut sums = vec![0.0; kv * KEYS];
        let call = move |cpu: &Cpu| {
            cpu.attention_mass(&operands.attention(0, Precision::F32), 0..KEYS, &mut sums);
        };
        Prepared { read, written, span: read + written, call: Box::new(call) }
    };
    Case {
        group: Group::Attention,
        kernel: "attention",
        shape: format!("attention_mass, {rows} × {KEYS}"),
        operations: (2 * pairs(rows) * query * width) as f64,
        bf16: false,
        one_thread: false,
        size: read + written,
        prepare: Box::new(prepare),
    }
}

/// Tokens and width of element-wise steps: 24 heads of 64.
const TOKENS: usize = 2048;
const WIDTH: usize = 1536;
const HEADS: usize = 24;
const HEAD: usize = 64;

fn element_wise(
    name: &str,
    operations: usize,
    read: usize,
    written: usize,
    call: impl Fn() -> Box<dyn FnMut(&Cpu)> + 'static,
) -> Case {
    Case {
        group: Group::Ops,
        kernel: "element-wise",
        shape: name.to_owned(),
        operations: operations as f64,
        bf16: false,
        one_thread: false,
        size: read + written,
        prepare: Box::new(move |_, _| Prepared { read, written, span: read + written, call: call() }),
    }
}

fn rms_norm() -> Case {
    let n = TOKENS * WIDTH;
    // A square, an addition, a scaling and a weight for each element.
    element_wise("rms_norm 2048×1536", 4 * n, 4 * (n + WIDTH), 4 * n, move || {
        let (x, weight, mut y) = (fill(n), fill(WIDTH), vec![0.0; n]);
        Box::new(move |cpu| cpu.rms_norm(&x, &weight, 1e-6, &mut y))
    })
}

fn rope() -> Case {
    let n = TOKENS * WIDTH;
    // Four multiplications, an addition and a subtraction for each pair of elements.
    element_wise("rope 2048×24×64", 3 * n, 4 * (n + TOKENS * HEAD), 4 * n, move || {
        let (mut x, [cos, sin]) = (fill(n), angles(TOKENS, HEAD / 2));
        Box::new(move |cpu| cpu.rope(&mut x, HEADS, HEAD, &cos, &sin, HEAD))
    })
}

fn place_keys() -> Case {
    let n = TOKENS * WIDTH;
    element_wise("place_keys f16 2048×24×64", 3 * n, 2 * n + 4 * TOKENS * HEAD, 2 * n, move || {
        let ([cos, sin], slots) = (angles(TOKENS, HEAD / 2), (0..TOKENS as u32).collect::<Vec<u32>>());
        let (src, mut dst) = (buffer(Dtype::F16, n), Buffer::zeros(Dtype::F16, n));
        Box::new(move |cpu| cpu.place_keys(src.as_slice(), HEADS, HEAD, &cos, &sin, HEAD, &slots, &mut dst))
    })
}

/// Softmax of one row of logits, on one thread.
fn softmax_row() -> Case {
    let n = 49152;
    // An exponential takes 22 operations; the maximum, the subtraction, the sum and the division take one each.
    let case = element_wise("softmax 49152, one thread", 26 * n, 4 * n, 4 * n, move || {
        let mut x = fill(n);
        Box::new(move |_| softmax(&mut x))
    });
    Case { one_thread: true, ..case }
}
