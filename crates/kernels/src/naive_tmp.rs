use crate::{Attention, Cpu};
use std::ops::Range;
impl Cpu {
    #[allow(missing_docs)]
    pub fn received(&self, a: &Attention, lse: &[f32], slots: Range<usize>, sums: &mut [f32]) {
        sums.fill(0.0);
        let (h, kh, d) = (a.heads, a.kv_heads, a.head_dim);
        for (r, (f, t)) in a.visible.iter().enumerate() {
            for head in 0..h {
                let g = head / (h / kh);
                for s in (*f as usize).max(slots.start)..(*t as usize).min(slots.end) {
                    let z: f32 = (0..d)
                        .map(|e| a.q[(r * h + head) * d + e] * a.k.get((g * a.capacity + s) * d + e))
                        .sum();
                    sums[g * slots.len() + s - slots.start] += (z * a.scale - lse[r * h + head]).exp();
                }
            }
        }
    }
    #[allow(missing_docs)]
    pub fn weights_of(&self, a: &Attention, lse: &[f32], slots: &[u32], out: &mut [f32]) {
        out.fill(0.0);
        let (h, kh, d) = (a.heads, a.kv_heads, a.head_dim);
        let rows = a.visible.len();
        for (r, (f, t)) in a.visible.iter().enumerate() {
            for head in 0..h {
                let g = head / (h / kh);
                for (i, s) in slots.iter().enumerate().filter(|(_, s)| (*f..*t).contains(s)) {
                    let s = *s as usize;
                    let z: f32 = (0..d)
                        .map(|e| a.q[(r * h + head) * d + e] * a.k.get((g * a.capacity + s) * d + e))
                        .sum();
                    out[i * rows + r] += (z * a.scale - lse[r * h + head]).exp();
                }
            }
        }
    }
}
