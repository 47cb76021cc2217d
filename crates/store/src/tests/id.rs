use std::collections::HashSet;

use refrain_kernels::Dtype;

use super::id;
use crate::{BosPolicy, ChunkId, ChunkKey, StoreError};

#[test]
fn every_field_enters_the_key() {
    let base = id(Dtype::F16);
    let mut model = base.clone();
    model.model[31] ^= 1;
    let variants = [
        base.clone(),
        model,
        ChunkId { dtype: Dtype::Bf16, ..base.clone() },
        ChunkId { dtype: Dtype::F32, ..base.clone() },
        ChunkId { layers: 3, ..base.clone() },
        ChunkId { kv_heads: 3, ..base.clone() },
        ChunkId { head_dim: 5, ..base.clone() },
        ChunkId { bos: BosPolicy::None, ..base.clone() },
        ChunkId { bos: BosPolicy::Kept, ..base.clone() },
        ChunkId { prefix: Some([0; 32]), ..base.clone() },
        ChunkId { prefix: Some(ChunkId::digest(&[5])), ..base.clone() },
        ChunkId { prefix: Some(ChunkId::digest(&[5, 0])), ..base.clone() },
        ChunkId { numerics: Some(String::new()), ..base.clone() },
        ChunkId { numerics: Some("bf16-avx2".into()), ..base.clone() },
        ChunkId { numerics: Some("bf16-avx512".into()), ..base.clone() },
        ChunkId { numerics: Some("bf16-avx512".into()), prefix: Some([0; 32]), ..base.clone() },
        ChunkId { namespace: "shared ".into(), ..base.clone() },
        ChunkId { namespace: String::new(), ..base.clone() },
        ChunkId { tokens: vec![5, 70_000], ..base.clone() },
        ChunkId { tokens: vec![70_000, 5, u32::MAX], ..base.clone() },
    ];
    let keys: HashSet<ChunkKey> = variants.iter().map(ChunkId::key).collect();
    assert_eq!(keys.len(), variants.len());
    for variant in &variants[1..] {
        assert!(base.difference(variant).is_some());
    }
    assert_eq!(base.difference(&base.clone()), None);
    assert_eq!(base.key(), base.clone().key());
}

/// Bytes that move from one field to the next make another key.
#[test]
fn the_encoding_is_unambiguous() {
    let base = ChunkId { namespace: String::new(), tokens: vec![], ..id(Dtype::F16) };
    let text = |namespace: &str, tokens: &[u32]| {
        ChunkId { namespace: namespace.into(), tokens: tokens.into(), ..base.clone() }.key()
    };
    let abcd = u32::from_le_bytes(*b"abcd");
    let keys: HashSet<ChunkKey> = [
        text("", &[abcd, abcd]),
        text("abcd", &[abcd]),
        text("abcdabcd", &[]),
        text("abcd\0\0\0\0\0\0\0\0", &[]),
        text("", &[0]),
        text("", &[0, 0]),
        text("\0\0\0\0", &[0]),
        ChunkId { layers: 4, kv_heads: 2, ..base.clone() }.key(),
        ChunkId { layers: 2, kv_heads: 4, ..base.clone() }.key(),
        ChunkId { numerics: Some("abcd".into()), ..base.clone() }.key(),
        ChunkId { numerics: Some(String::new()), namespace: "abcd".into(), ..base.clone() }.key(),
        ChunkId { numerics: Some("\u{1}".repeat(32)), ..base.clone() }.key(),
        ChunkId { numerics: Some(String::new()), prefix: Some([1; 32]), ..base.clone() }.key(),
    ]
    .into();
    assert_eq!(keys.len(), 13);
}

/// Chunks of earlier builds stay valid: change the format version before changing this.
#[test]
fn keys_stay_what_they_are() {
    assert_eq!(
        id(Dtype::F16).key().to_string(),
        "83051e67ae93aad230ea79effe24a2080e94063aaeefce7158b943422c3a7571"
    );
    let numerics = ChunkId { numerics: Some("bf16-avx512".into()), ..id(Dtype::F16) };
    assert_eq!(
        numerics.key().to_string(),
        "5416ba930ba03b7dea10675d4fb6e1c2a14d9f22cbb1d20526c4202eaf91e318"
    );
}

#[test]
fn keys_are_shown_and_read() {
    let key = id(Dtype::F32).key();
    let text = key.to_string();
    assert_eq!(text.len(), 64);
    assert_eq!(text.parse::<ChunkKey>().unwrap(), key);
    assert_eq!(text.to_uppercase().parse::<ChunkKey>().unwrap(), key);
    assert_eq!(key.short().to_string(), text[..12]);
    assert_eq!(serde_json::to_string(&key).unwrap(), format!("\"{text}\""));
    for bad in ["", "12", &text[..63], &format!("{text}0"), &format!("{}g", &text[..63]), &"é".repeat(32)] {
        assert!(matches!(bad.parse::<ChunkKey>(), Err(crate::InvalidKey { .. })), "{bad}");
    }
}

#[test]
fn names_of_policies_are_read_back() {
    for bos in [BosPolicy::None, BosPolicy::Dropped, BosPolicy::Kept] {
        assert_eq!(bos.to_string().parse(), Ok(bos));
    }
    assert!("Kept".parse::<BosPolicy>().unwrap_err().to_string().contains("none, dropped or kept"));
}

#[test]
fn impossible_sizes_are_refused() {
    let base = id(Dtype::F16);
    for bad in [
        ChunkId { tokens: vec![], ..base.clone() },
        ChunkId { layers: 0, ..base.clone() },
        ChunkId { layers: 1001, ..base.clone() },
        ChunkId { kv_heads: 0, ..base.clone() },
        ChunkId { head_dim: usize::MAX, ..base.clone() },
        ChunkId { head_dim: usize::MAX / 12, ..base.clone() },
    ] {
        assert!(matches!(bad.layout(), Err(StoreError::Shape { .. })));
    }
}
