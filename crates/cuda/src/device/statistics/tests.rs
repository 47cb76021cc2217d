use refrain_kernels::conformance::random;
use refrain_kernels::{Buffer, CachedAttention, Device, Dtype, Precision, WeightAggregation, upload};

use crate::{CudaDevice, Emulated};

/// Weights that are held at once, some slots of them or one, change no score.
#[test]
fn scores_are_the_same_whatever_is_held_at_once() {
    let (heads, kv_heads, head_dim, capacity) = (4, 2, 64, 120);
    let visible = [(3, 90), (10, 91), (0, 92)];
    for (dtype, precision) in [(Dtype::F16, Precision::Bf16), (Dtype::F32, Precision::F32)] {
        let device = CudaDevice::new(Emulated::new(3), 1).unwrap();
        let mut k = Buffer::zeros(dtype, kv_heads * capacity * head_dim);
        k.write_f32(0, &random(kv_heads * capacity * head_dim, 1));
        let (q, k) = (random(visible.len() * heads * head_dim, 2), device.upload_kv(k.as_slice()));
        let a = CachedAttention {
            q: &upload(&device, &q),
            first_row: 0,
            k: &k,
            v: &k,
            heads,
            kv_heads,
            head_dim,
            capacity,
            visible: &visible,
            scale: 0.125,
            precision,
        };
        for aggregation in [WeightAggregation::L2, WeightAggregation::Max] {
            let scores = |held| {
                let mut scores = [7.0; 81];
                device.read_aggregated_weights(&a, 8..89, aggregation, held, &mut scores);
                scores
            };
            let all = scores(usize::MAX);
            assert!(all.iter().all(|score| *score > 0.0), "{all:?}");
            for held in [1, 6 * 7, 6 * 40] {
                assert_eq!(scores(held), all, "{aggregation:?} of {dtype}, {held} held");
            }
        }
    }
}
