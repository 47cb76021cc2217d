//! Names of blocks.

/// Tokens of a block.
pub(crate) const BLOCK: usize = 16;

/// A hash that stands for a block of tokens and all that comes before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BlockHash(pub(crate) [u8; 32]);

/// The beginning of a chain of blocks: all that their keys and values depend on beside their tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PrefixRoot {
    pub(crate) hash: BlockHash,
    /// None without chunks that a method has reused. Their keys and values depend on the question too, so that the root then stands for the
    /// whole prompt that the method worked on.
    pub(crate) fused: Option<FusedQuestion>,
    /// The namespace whose chunks a prompt draws on, and the one that is shared with it; none of a prompt without chunks.
    pub(crate) namespaces: [Option<BlockHash>; 2],
    /// The cache's clock when the prompt began. A prompt that began before its namespace was forgotten is not kept.
    pub(crate) forgotten: u64,
}

/// A question over chunks that a method has reused. The prompts that begin with it go on from the repair that was made for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FusedQuestion {
    /// The hash of all up to the end of the chunks.
    pub(crate) chunks: BlockHash,
    /// The hash of the question's tokens, without the tail that history may omit, and their number.
    asked: (BlockHash, usize),
}

impl FusedQuestion {
    /// The question `asked` behind chunks.
    pub(crate) fn new(chunks: BlockHash, asked: &[u32]) -> FusedQuestion {
        FusedQuestion { chunks, asked: (hash(&[], asked), asked.len()) }
    }

    /// Whether the tokens behind the chunks begin with the question.
    pub(crate) fn begins(&self, tokens: &[u32]) -> bool {
        let (asked, length) = self.asked;
        tokens.get(..length).is_some_and(|beginning| hash(&[], beginning) == asked)
    }
}

/// The name of a namespace.
pub(crate) fn namespace_hash(namespace: &str) -> BlockHash {
    hash(&[b"namespace", namespace.as_bytes()], &[])
}

/// The names of the whole blocks of `ids`.
pub(crate) fn chain(root: BlockHash, ids: &[u32]) -> impl Iterator<Item = BlockHash> {
    ids.chunks_exact(BLOCK).scan(root, |before, tokens| {
        *before = hash(&[&before.0], tokens);
        Some(*before)
    })
}

/// The hash of parts, each with its length, and of tokens.
pub(crate) fn hash(parts: &[&[u8]], tokens: &[u32]) -> BlockHash {
    let mut hasher = blake3::Hasher::new_derive_key("refrain prefix cache, version 1");
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    BlockHash(*hasher.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_stands_for_all_tokens_up_to_the_end_of_its_block() {
        let root = hash(&[b"root"], &[]);
        let ids: Vec<u32> = (0..40).collect();
        let names: Vec<BlockHash> = chain(root, &ids).collect();
        assert_eq!(names.len(), 2);
        let mut other = ids.clone();
        other[20] = 7;
        let others: Vec<BlockHash> = chain(root, &other).collect();
        assert!(names[0] == others[0] && names[1] != others[1]);
        other[0] = 7;
        let others: Vec<BlockHash> = chain(root, &other).collect();
        assert!(names[0] != others[0] && names[1] != others[1]);
        assert_ne!(chain(hash(&[b"ro", b"ot"], &[]), &ids).next(), Some(names[0]));
    }
}
