//! The tokens that NVIDIA's kvpress keeps of the same queries and keys (tools/golden_kvpress.py).

use refrain_eviction::{Eviction, H2o};
use refrain_kernels::Dtype;
use serde::Deserialize;

use super::given::Given;
use super::policy;
use crate::tests::device;

#[derive(Deserialize)]
struct File {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    tokens: usize,
    capacity: usize,
    #[serde(default)]
    window: usize,
    #[serde(default)]
    kernel: usize,
    #[serde(default)]
    sinks: usize,
    /// Last rows first to last, `rows × H × d`.
    #[serde(default)]
    q: Vec<f32>,
    /// `Hkv × n × d`
    #[serde(default)]
    k: Vec<f32>,
    kept: Vec<Vec<u32>>,
}

impl Case {
    /// The tokens of the prompt that a policy keeps.
    fn keeps(&self, eviction: &Eviction) -> Vec<Vec<u32>> {
        let Case { heads, kv_heads, head_dim, tokens, .. } = *self;
        let width = heads * head_dim;
        // Rows that are not given are never looked at.
        let mut q = vec![f32::NAN; tokens * width - self.q.len()];
        q.extend(&self.q);
        let k = if self.k.is_empty() { vec![0.0; kv_heads * tokens * head_dim] } else { self.k.clone() };
        let given = Given {
            layers: 1,
            heads,
            kv_heads,
            head_dim,
            n: tokens,
            system: 1,
            question: 1,
            computed: (0..tokens as u32).collect(),
            attends_first: false,
            dtype: Dtype::F32,
            q,
            v: k.clone(),
            k,
        };
        let bounded = given.prefilled(&device(), eviction, tokens + 100).unwrap();
        let sorted = |head| {
            let mut positions = bounded.positions(0, head).to_vec();
            positions.sort_unstable();
            positions
        };
        (0..kv_heads).map(sorted).collect()
    }
}

fn cases(name: &str) -> Vec<Case> {
    let path = format!("{}/../../tests/golden/kvpress/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str::<File>(&std::fs::read_to_string(path).unwrap()).unwrap().cases
}

#[test]
fn snap_kv_keeps_what_kvpress_keeps() {
    for (i, case) in cases("snap_kv").iter().enumerate() {
        let Case { capacity, window, kernel, .. } = case;
        let spec = format!("snap_kv:capacity={capacity},window={window},kernel={kernel}");
        assert_eq!(case.keeps(&policy(&spec)), case.kept, "case {i}");
        // Other options keep other tokens, where there is a choice.
        let max = policy(&format!("{spec},pool=max"));
        assert!(
            *kernel == 1
                || *capacity + 1 >= case.tokens
                || *capacity == window + 1
                || case.keeps(&max) != case.kept
        );
    }
}

#[test]
fn streaming_llm_keeps_what_kvpress_keeps() {
    for (i, case) in cases("streaming_llm").iter().enumerate() {
        let Case { capacity, sinks, .. } = case;
        let spec = format!("streaming_llm:capacity={capacity},sinks={sinks},positions=original");
        assert_eq!(case.keeps(&policy(&spec)), case.kept, "case {i}");
    }
}

/// kvpress averages over the rows that could see a token and protects no recent one.
#[test]
fn h2o_keeps_what_kvpress_keeps_by_observed_attention() {
    let mut plain = 0;
    for (i, case) in cases("observed_attention").iter().enumerate() {
        let h2o = |normalise| {
            let policy = H2o { capacity: case.capacity, recent: Some(0), normalise, ..H2o::default() };
            Eviction { policy: std::sync::Arc::new(policy), per_query_head: false }
        };
        assert_eq!(case.keeps(&h2o(true)), case.kept, "case {i}");
        plain += usize::from(case.keeps(&h2o(false)) != case.kept);
    }
    assert!(plain > 0, "a plain sum chooses otherwise");
}
