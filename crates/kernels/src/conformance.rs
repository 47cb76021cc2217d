//! Conditions that every device must keep to: what it computes is what [`ReferenceDevice`] computes. A new device runs them in
//! one line.

mod attention;

use bytes::BytesMut;

use crate::buffer::{Buffer, Dtype};
use crate::device::{
    CacheHeads, Device, Distance, Experts, GatedMlp, KvBuffer, KvRows, LayerTail, Mlp, Norm, PackedLinear,
    QkNorms, Rotary, RowUnavailable, WeightMatrix, download, upload,
};
use crate::host_bytes::{HostBytes, HostSlice};
use crate::linear::{Activation, Precision, WeightRows};
use crate::reference::ReferenceDevice;

const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const HIDDEN: usize = 40;
const INTERMEDIATE: usize = 72;
const EXPERTS: usize = 5;
const CAPACITY: usize = 150;
const CACHE: CacheHeads = CacheHeads { kv_heads: KV_HEADS, head_dim: HEAD_DIM };

/// Checks a device on random tensors of every type; panics with the call that differs.
///
/// Results in `f32` differ from the reference's by rounding alone. What is moved or gathered is the same to the bit. A call on
/// some rows leaves the others as they were.
///
/// # Panics
/// If the device breaks one of these.
pub fn check(device: &dyn Device) {
    for dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
        for rows in [1, 3, 40] {
            let both = Both { device, rows, dtype, what: format!("{}, {dtype}, {rows} rows", device.name()) };
            both.activations();
            both.layer();
            both.caches();
            both.attention();
            both.reports();
        }
    }
    let missing = |_: usize, _: &mut [f32]| Err(RowUnavailable);
    let rows = WeightRows::F32(&missing);
    let matrix = WeightMatrix { precision: Precision::F32, outputs: 8, inputs: 8, bias: None, rows };
    assert_eq!(device.pack(matrix).err(), Some(RowUnavailable), "a row that cannot be had stops packing");
}

/// A device beside the reference.
struct Both<'a> {
    device: &'a dyn Device,
    rows: usize,
    dtype: Dtype,
    what: String,
}

/// Numbers from −1 to 1, the same for each seed.
pub fn random(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Numbers of [`random`], rounded to `dtype`.
pub fn stored(dtype: Dtype, count: usize, seed: u32) -> Buffer {
    let mut buffer = Buffer::zeros(dtype, count);
    buffer.write_f32(0, &random(count, seed));
    buffer
}

/// Elements as bytes of the host, from the beginning of a page on.
fn in_one_piece(elements: &Buffer) -> HostBytes {
    const PAGE: usize = 4096;
    let from = elements.as_slice().as_bytes();
    let mut piece = BytesMut::zeroed(from.len() + PAGE);
    let mut bytes = piece.split_off(piece.as_ptr().addr().wrapping_neg() % PAGE);
    bytes[..from.len()].copy_from_slice(from);
    bytes.truncate(from.len());
    HostBytes::new(bytes.freeze())
}

fn elements(device: &dyn Device, kv: &KvBuffer) -> Vec<f32> {
    device.download_kv(kv, 0..kv.len()).as_slice().floats()
}

fn packed(device: &dyn Device, outputs: usize, inputs: usize, gated: bool, seed: u32) -> PackedLinear {
    let w: Vec<f32> = random(outputs * inputs, seed).iter().map(|w| w / (inputs as f32).sqrt()).collect();
    let row = |row: usize, out: &mut [f32]| {
        out.copy_from_slice(&w[row * inputs..(row + 1) * inputs]);
        Ok(())
    };
    let (bias, rows) = (Some(random(outputs, seed + 1)), WeightRows::F32(&row));
    let matrix = WeightMatrix { precision: Precision::F32, outputs, inputs, bias, rows };
    let packed = if gated { device.pack_gate_up(matrix) } else { device.pack(matrix) };
    packed.unwrap_or_else(|RowUnavailable| unreachable!("every row is there"))
}

/// Cosines and sines of `tokens` tokens, of which three quarters of a head are rotated.
fn table(tokens: usize) -> (Vec<f32>, Vec<f32>) {
    let half = HEAD_DIM * 3 / 8;
    let angle = |i: usize| (i / half) as f32 * 0.9f32.powi((i % half) as i32);
    (0..tokens * half).map(|i| (angle(i).cos(), angle(i).sin())).unzip()
}

/// Slots that rows at the end of the cache see: all before them, within a window.
fn visible(rows: usize) -> Vec<(u32, u32)> {
    let last = |row: usize| CAPACITY - rows + row;
    (0..rows).map(|row| (last(row).saturating_sub(90) as u32, last(row) as u32 + 1)).collect()
}

impl Both<'_> {
    /// Runs `f` on the device and on the reference, whose numbers must be the same but for rounding.
    fn agree(&self, call: &str, f: impl Fn(&dyn Device) -> Vec<f32>) {
        // An element of a type may be rounded to its neighbour.
        let unit = match self.dtype {
            Dtype::F32 => 2e-5,
            Dtype::F16 => 2e-3,
            Dtype::Bf16 => 2e-2,
        };
        let (got, expected) = (f(self.device), f(&ReferenceDevice));
        assert_eq!(got.len(), expected.len(), "{}: {call}: the length", self.what);
        for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let close = (got - expected).abs() <= unit * expected.abs().max(1.0) || got == expected;
            assert!(close, "{}: {call}: element {i} is {got} and not {expected}", self.what);
        }
    }

    /// Runs `f` on the device and on the reference, whose numbers must be the same to the bit.
    fn same(&self, call: &str, f: impl Fn(&dyn Device) -> Vec<f32>) {
        assert_eq!(f(self.device), f(&ReferenceDevice), "{}: {call}", self.what);
    }

    fn activations(&self) {
        let values = random(self.rows * HIDDEN, 1);
        let x = |d: &dyn Device| upload(d, &values);
        self.same("upload and download", |d| download(d, &x(d)));
        self.same("upload_rows", |d| {
            let mut rows = d.floats(7);
            d.upload_rows(self.rows, HIDDEN, &|i, row| row.fill(i as f32), &mut rows);
            download(d, &rows)
        });
        self.same("copy", |d| {
            let mut to = x(d);
            d.copy(&x(d), 3..11, &mut to, 17);
            download(d, &to)
        });
        self.same("gather_rows", |d| {
            let mut out = d.floats(0);
            d.gather_rows(&x(d), HIDDEN, &[self.rows as u32 - 1, 0, 0], &mut out);
            download(d, &out)
        });
        self.same("resize", |d| {
            let mut x = x(d);
            d.resize(&mut x, 12);
            vec![x.len() as f32]
        });
        self.agree("mean_row", |d| d.mean_row(&x(d), HIDDEN, 0..self.rows));
        self.agree("rope", |d| {
            let (cos, sin) = table(self.rows);
            let mut x = upload(d, &random(self.rows * HEADS * HEAD_DIM, 2));
            d.rope(&mut x, HEADS, HEAD_DIM, Rotary::new(&cos, &sin));
            download(d, &x)
        });
    }

    fn layer(&self) {
        let (q, kv) = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM);
        let (weight, head) = (random(HIDDEN, 3), random(HEAD_DIM, 4));
        let (all_q, all_k) = (random(q, 26), random(kv, 27));
        let norm = |weight| Norm { weight, eps: 1e-5 };
        // Norms of a branch's input and of each head, and norms of all heads together after no norm.
        let heads = QkNorms { q: norm(&head), k: norm(&head) };
        let together = QkNorms { q: norm(&all_q), k: norm(&all_k) };
        let norm = norm(&weight);
        let x = |d: &dyn Device| upload(d, &random(self.rows * HIDDEN, 5));
        for (norm, qk_norms) in [(Some(norm), None), (Some(norm), Some(heads)), (None, Some(together))] {
            self.agree("project_qkv", |d| {
                let w = packed(d, q + 2 * kv, HIDDEN, false, 6);
                // Longer than what is projected: it stays so.
                let mut new = (d.floats(0), d.kv(self.dtype, 50 * kv), d.kv(self.dtype, 0));
                let rows = self.rows / 3..self.rows;
                let (x, count) = (x(d), rows.len());
                d.project_qkv(&x, rows, norm, &w, qk_norms, kv, &mut new.0, &mut new.1, &mut new.2);
                let lengths = (new.0.len(), new.1.len(), new.2.len());
                assert_eq!(lengths, (count * q, 50 * kv, count * kv), "keys and values grow");
                let sides = [&new.1, &new.2].map(|side| elements(d, side)[..count * kv].to_vec());
                [download(d, &new.0), sides.concat()].concat()
            });
        }
        let (some, silu, gelu) = (Some(norm), Activation::Silu, Activation::GeluTanh);
        for (mlp_norm, post, activation, mixture) in [
            (some, None, silu, None),
            (some, some, gelu, None),
            (None, some, silu, None),
            (some, None, silu, Some((3, true))),
            (some, some, gelu, Some((1, false))),
            (None, some, silu, Some((EXPERTS, false))),
        ] {
            self.agree("attn_output_and_mlp", |d| {
                let mlp = |seed| GatedMlp {
                    gate_up: packed(d, 2 * INTERMEDIATE, HIDDEN, true, seed),
                    down: packed(d, HIDDEN, INTERMEDIATE, false, seed + 1),
                };
                let (output, router) = (packed(d, HIDDEN, q, false, 7), packed(d, EXPERTS, HIDDEN, false, 8));
                let experts: Vec<GatedMlp> = (0..EXPERTS as u32).map(|e| mlp(40 + 2 * e)).collect();
                let mlp = match mixture {
                    None => Mlp::Dense(&experts[0]),
                    Some((top_k, normalised)) => {
                        Mlp::Experts(Experts { router: &router, experts: &experts, top_k, normalised })
                    }
                };
                let tail = LayerTail {
                    output: &output,
                    attention_post_norm: post,
                    mlp_norm,
                    mlp,
                    activation,
                    mlp_post_norm: post,
                    next: &output,
                };
                let (mut x, attended) = (x(d), upload(d, &random(self.rows * q, 13)));
                let (before, first) = (download(d, &x), self.rows / 3);
                d.attn_output_and_mlp((&attended, first / 2), &tail, first..self.rows, &mut x);
                let after = download(d, &x);
                assert_eq!(after[..first * HIDDEN], before[..first * HIDDEN], "other rows stay");
                after
            });
        }
        self.agree("logits", |d| {
            let mut out = vec![9.0; 3];
            d.logits(&x(d), norm, &packed(d, 101, HIDDEN, false, 14), &mut out);
            out
        });
    }

    /// Parts of pinned bytes, where the device takes them by itself.
    fn pinned(&self, rows: &Buffer) {
        let [first, second] = [(); 2].map(|()| in_one_piece(rows));
        let (dtype, size) = (self.dtype, self.dtype.size());
        let part =
            |of, from: usize, to: usize| HostSlice::new(of, dtype, from * size..to * size).expect("aligned");
        let parts = [part(&first, 8, 24), part(&second, 0, 40), part(&first, 2, 2), part(&first, 16, 17)];
        assert!(self.device.upload_pinned_kv(&parts).is_none(), "{}: nothing is pinned", self.what);
        for bytes in [&first, &second] {
            self.device.pin(bytes);
        }
        assert_eq!(first.is_pinned(), self.device.memory().is_some(), "{}: pin", self.what);
        if let Some(kv) = self.device.upload_pinned_kv(&parts) {
            let wanted: Vec<f32> = parts.iter().flat_map(|part| part.slice().floats()).collect();
            assert_eq!(elements(self.device, &kv), wanted, "{}: upload_pinned_kv", self.what);
        }
        assert_eq!(self.device.upload_pinned_kv(&parts).is_some(), first.is_pinned(), "{}", self.what);
    }

    fn caches(&self) {
        let width = CACHE.width();
        let all = stored(self.dtype, KV_HEADS * CAPACITY * HEAD_DIM, 15);
        let cache = |d: &dyn Device| d.upload_kv(all.as_slice());
        let rows = stored(self.dtype, (self.rows + 2) * width, 16);
        let of_slots = rows.as_slice().range(0..self.rows * width);
        let (cos, sin) = table(self.rows);
        let rotary = Rotary::new(&cos, &sin);
        let slots: Vec<u32> = (0..self.rows as u32).map(|i| (7 * i + 5) % CAPACITY as u32).collect();
        self.same("upload_kv and download_kv", |d| elements(d, &cache(d)));
        self.pinned(&rows);
        self.same("kv and resize_kv", |d| {
            let mut kv = d.kv(self.dtype, 6);
            d.resize_kv(&mut kv, 20);
            assert!(kv.bytes() >= 20 * self.dtype.size(), "bytes are those allocated");
            elements(d, &kv)
        });
        self.same("copy_kv and copy_kv_within", |d| {
            let (from, mut to) = (cache(d), d.kv(self.dtype, 40));
            d.copy_kv(&from, 8..24, &mut to, 10);
            d.copy_kv_within(&mut to, 10..26, 12);
            elements(d, &to)
        });
        for rotary in [Rotary::default(), rotary] {
            self.agree("place from the host", |d| {
                let mut cache = cache(d);
                d.place(KvRows::Host(of_slots), CACHE, rotary, &slots, &mut cache);
                elements(d, &cache)
            });
            self.agree("place from the device", |d| {
                let mut cache = cache(d);
                let rows = d.upload_kv(rows.as_slice());
                d.place(KvRows::Device(&rows, 2), CACHE, rotary, &slots, &mut cache);
                elements(d, &cache)
            });
        }
        self.agree("rope_and_place", |d| {
            let (mut q, k) =
                (upload(d, &random(self.rows * HEADS * HEAD_DIM, 28)), d.upload_kv(rows.as_slice()));
            let (mut caches, own) = ((cache(d), cache(d)), KvRows::Host(of_slots));
            let into = (&mut caches.0, &mut caches.1);
            d.rope_and_place(
                Some((&mut q, HEADS)),
                (KvRows::Device(&k, 2), own),
                CACHE,
                rotary,
                &slots,
                into,
            );
            let into = (&mut caches.1, &mut caches.0);
            d.rope_and_place(None, (own, KvRows::Device(&k, 1)), CACHE, rotary, &slots, into);
            [download(d, &q), elements(d, &caches.0), elements(d, &caches.1)].concat()
        });
        let (host, device) = (
            |d: &dyn Device| {
                let mut cache = cache(d);
                d.place(KvRows::Host(of_slots), CACHE, rotary, &slots, &mut cache);
                elements(d, &cache)
            },
            |d: &dyn Device| {
                let (mut cache, rows) = (cache(d), d.upload_kv(rows.as_slice()));
                d.place(KvRows::Device(&rows, 0), CACHE, rotary, &slots, &mut cache);
                elements(d, &cache)
            },
        );
        assert_eq!(host(self.device), device(self.device), "{}: one key, wherever it comes from", self.what);
        self.same("gather_kv_rows", |d| {
            elements(d, &d.gather_kv_rows(&d.upload_kv(rows.as_slice()), width, &[1, 0, 2, 2]))
        });
        let kept: Vec<u32> = (0..KV_HEADS as u32).flat_map(|head| [head, 4, 5, 6, 40 + head]).collect();
        self.same("gather_slots", |d| {
            elements(d, &d.gather_slots(&cache(d), HEAD_DIM, CAPACITY, &kept, 1, 9))
        });
        self.same("gather_slots for every query head", |d| {
            let kept = [&kept[..], &kept].concat();
            elements(d, &d.gather_slots(&cache(d), HEAD_DIM, CAPACITY, &kept, 2, 5))
        });
        self.agree("rotate_slots", |d| {
            elements(d, &d.rotate_slots(&cache(d), CACHE, CAPACITY, &slots, rotary))
        });
        for rotary in [Rotary::default(), rotary] {
            self.agree("sum_changes", |d| {
                let fresh = d.upload_kv(rows.as_slice());
                let pairs: Vec<(usize, u32)> = slots.iter().enumerate().map(|(i, slot)| (i, *slot)).collect();
                let (first, rest) = pairs.split_at(self.rows / 3);
                let groups = [first.to_vec(), Vec::new(), rest.to_vec()];
                d.sum_changes((&fresh, self.rows), &cache(d), CACHE, &groups, rotary)
            });
            self.agree("add_rows", |d| {
                let (mut cache, end) = (cache(d), self.rows);
                let spans = [0..end / 3, end / 3..end / 3, end / 2..end];
                d.add_rows(&random(3 * width, 21), CACHE, rotary, &spans, &mut cache);
                elements(d, &cache)
            });
        }
        self.agree("sum_changes of no group", |d| {
            d.sum_changes((&d.upload_kv(rows.as_slice()), 1), &cache(d), CACHE, &[], Rotary::default())
        });
        self.agree("row_distances", |d| {
            let (fresh, pairs) = (d.upload_kv(rows.as_slice()), [(0, 1), (2, 0), (1, 1)]);
            let distances = |distance| d.row_distances(&fresh, all.as_slice(), width, &pairs, distance);
            [distances(Distance::L2), distances(Distance::L1)].concat()
        });
    }
}
