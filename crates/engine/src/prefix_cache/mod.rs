//! Exact prefix caching: keys and values of prompts and answers, kept in memory by blocks of tokens. A later prompt that begins
//! with the same tokens takes them over, to the bit, and computes only what follows.
//!
//! A block's name is a hash of its tokens and of the name of the block before it, so that it stands for all tokens up to its end
//! (as vLLM's prefix caching has it). The chain begins with a root, which stands for all that keys and values depend on beside the
//! tokens: the namespace, the rotation, and, where chunks were reused, the method and the whole prompt that it worked on. A prompt goes on
//! from such a chain if it begins with the same question ([`FusedQuestion`]); the blocks decide how far.

mod chain;
mod rows;

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use refrain_kernels::Device;
use refrain_kv::{KvCache, LayerCache};

pub(crate) use self::chain::{BLOCK, BlockHash, FusedQuestion, PrefixRoot, chain, hash, namespace_hash};
use self::rows::CachedRows;

/// Identifies a run of blocks.
type RunId = u64;

/// Keys and values of blocks that follow each other, made at once.
#[derive(Debug)]
struct Run {
    rows: Arc<CachedRows>,
    blocks: Vec<BlockHash>,
    /// The run whose blocks come before these; none for the first of a chain.
    parent: Option<RunId>,
    /// The root of a chain that begins with these blocks.
    root: Option<PrefixRoot>,
    namespaces: [Option<BlockHash>; 2],
    /// When the run was used last. A run is used whenever one that follows it is.
    used: u64,
}

#[derive(Debug, Default)]
struct State {
    runs: HashMap<RunId, Run>,
    /// The run of each block, and its index there.
    blocks: HashMap<BlockHash, (RunId, usize)>,
    by_use: BTreeMap<u64, RunId>,
    /// The roots of the chains over the same reused chunks.
    fused: HashMap<BlockHash, Vec<PrefixRoot>>,
    /// When prompts over the documents of a namespace were forgotten last.
    forgotten: HashMap<BlockHash, u64>,
    bytes: usize,
    clock: u64,
}

/// Keys and values of the first tokens of a prompt.
#[derive(Debug)]
pub(crate) struct CachedPrefix {
    parts: Vec<(Arc<CachedRows>, Range<usize>)>,
    tokens: usize,
    /// The root of the chain, which what follows the prefix belongs to as well.
    pub(crate) root: PrefixRoot,
}

impl CachedPrefix {
    /// Tokens of the prefix.
    pub(crate) fn len(&self) -> usize {
        self.tokens
    }

    /// Copies a layer's keys and values into the first slots of `cache`, which has `capacity` of them a head.
    pub(crate) fn place(&self, device: &dyn Device, layer: usize, cache: &mut LayerCache, capacity: usize) {
        let mut slot = 0;
        for (rows, range) in &self.parts {
            rows.copy_to(device, layer, range.clone(), cache, (capacity, slot));
            slot += range.len();
        }
    }
}

/// Keys and values of prompts and answers, within a bound of bytes. Those that were not used for longest go first.
#[derive(Debug)]
pub(crate) struct PrefixCache {
    bound: usize,
    state: Mutex<State>,
}

impl PrefixCache {
    /// A cache of `bound` bytes at most; 0 keeps nothing.
    pub(crate) fn new(bound: usize) -> PrefixCache {
        PrefixCache { bound, state: Mutex::default() }
    }

    /// Most bytes of keys and values that are kept.
    pub(crate) fn bound(&self) -> usize {
        self.bound
    }

    pub(crate) fn is_on(&self) -> bool {
        self.bound > 0
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bytes of keys and values that are kept.
    pub(crate) fn bytes(&self) -> usize {
        self.state().bytes
    }

    /// The time by which [`PrefixCache::forget`] tells prompts that began before it.
    pub(crate) fn clock(&self) -> u64 {
        self.state().clock
    }

    /// Forgets all prompts over documents of a namespace, or of one that shares it, and what goes on from them. Nothing that began before is
    /// kept later.
    pub(crate) fn forget(&self, namespace: &str) {
        let namespace = namespace_hash(namespace);
        let mut state = self.state();
        let now = state.tick();
        state.forgotten.insert(namespace, now);
        let mut ids: Vec<RunId> = state.runs.keys().copied().collect();
        // A run is younger than the one before it.
        ids.sort_unstable();
        for id in ids {
            let Run { namespaces, parent, used, .. } = &state.runs[&id];
            let is_orphan = parent.is_some_and(|parent| !state.runs.contains_key(&parent));
            if is_orphan || namespaces.contains(&Some(namespace)) {
                let used = *used;
                state.by_use.remove(&used);
                state.remove(id);
            }
        }
    }

    /// The longest prefix of `ids` that is kept under `root`, of at least 1 and at most `most` tokens.
    pub(crate) fn find(&self, root: &PrefixRoot, ids: &[u32], most: usize) -> Option<CachedPrefix> {
        let mut state = self.state();
        let mut parts: Vec<(RunId, Range<usize>)> = Vec::new();
        for hash in chain(root.hash, &ids[..most.min(ids.len())]) {
            let Some((run, index)) = state.blocks.get(&hash).copied() else { break };
            match parts.last_mut() {
                Some((last, range)) if *last == run => range.end = (index + 1) * BLOCK,
                _ => parts.push((run, index * BLOCK..(index + 1) * BLOCK)),
            }
        }
        let (deepest, _) = parts.last()?;
        state.touch(*deepest);
        let rows = |(run, range): (RunId, Range<usize>)| (state.runs[&run].rows.clone(), range);
        let parts: Vec<_> = parts.into_iter().map(rows).collect();
        let tokens = parts.iter().map(|(_, range)| range.len()).sum();
        Some(CachedPrefix { parts, tokens, root: *root })
    }

    /// [`PrefixCache::find`] for a prompt whose chunks a method reuses, under the root of any prompt with whose question it begins. `own`
    /// is the root of the prompt itself. Its chunks end at `least` tokens, all of which the prefix is to hold.
    pub(crate) fn find_fused(&self, own: &PrefixRoot, ids: &[u32], least: usize) -> Option<CachedPrefix> {
        let chunks = own.fused?.chunks;
        let mut roots = self.state().fused.get(&chunks).cloned().unwrap_or_default();
        roots.retain(|root| root.fused.is_some_and(|fused| fused.begins(&ids[least..])));
        let under = |root: PrefixRoot| PrefixRoot { hash: root.hash, fused: root.fused, ..*own };
        let found = roots.into_iter().filter_map(|root| self.find(&under(root), ids, ids.len() - 1));
        found.filter(|prefix| prefix.len() >= least).max_by_key(CachedPrefix::len)
    }

    /// Keeps the whole blocks of the tokens `ids`, whose keys and values lie in the first slots of `cache`.
    pub(crate) fn insert(&self, device: &dyn Device, root: &PrefixRoot, ids: &[u32], cache: &KvCache) {
        if self.state().has_forgotten(root) {
            return;
        }
        let blocks: Vec<BlockHash> = chain(root.hash, ids).collect();
        let block_bytes = BLOCK * cache.shape().token_bytes(cache.dtype());
        let mut state = self.state();
        let known_to =
            |state: &State| blocks.iter().take_while(|block| state.blocks.contains_key(*block)).count();
        let mut known = known_to(&state);
        // The first blocks are those that other prompts share.
        let kept = blocks.len().min(self.bound / block_bytes.max(1));
        if known >= kept {
            return;
        }
        // Runs that make room go before the copy is made: they and the copy together might be twice the bound.
        if let Some((parent, _)) = known.checked_sub(1).map(|last| state.blocks[&blocks[last]]) {
            state.touch(parent);
        }
        state.make_room((kept - known) * block_bytes, self.bound);
        // A run of which few blocks are shared may have gone itself.
        if known_to(&state) < known {
            known = known_to(&state);
            state.make_room((kept - known) * block_bytes, self.bound);
        }
        drop(state);
        let rows = CachedRows::copy_from(device, cache, known * BLOCK..kept * BLOCK);
        self.state().add(root, &blocks[..kept], known, rows, self.bound);
    }
}

impl State {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Counts a run and those before it as used. The first of a chain is used last, and so leaves last.
    fn touch(&mut self, run: RunId) {
        let mut next = Some(run);
        while let Some(id) = next {
            let used = self.tick();
            let Some(run) = self.runs.get_mut(&id) else { return };
            self.by_use.remove(&run.used);
            run.used = used;
            next = run.parent;
            self.by_use.insert(used, id);
        }
    }

    /// Whether a prompt is over documents of a namespace that was forgotten since it began.
    fn has_forgotten(&self, root: &PrefixRoot) -> bool {
        let later = |namespace| self.forgotten.get(namespace).is_some_and(|at| *at > root.forgotten);
        root.namespaces.iter().flatten().any(later)
    }

    /// Adds the run of the blocks from `known` on, unless others have changed the chain meanwhile.
    fn add(&mut self, root: &PrefixRoot, blocks: &[BlockHash], known: usize, rows: CachedRows, bound: usize) {
        let parent = match known.checked_sub(1) {
            None => None,
            Some(last) => match self.blocks.get(&blocks[last]) {
                Some((run, _)) => Some(*run),
                None => return,
            },
        };
        if self.blocks.contains_key(&blocks[known]) || self.has_forgotten(root) {
            return;
        }
        let id = self.tick();
        self.bytes += rows.bytes();
        for (index, block) in blocks[known..].iter().enumerate() {
            self.blocks.insert(*block, (id, index));
        }
        let first = parent.is_none().then_some(*root);
        if let Some(fused) = root.fused.filter(|_| first.is_some()) {
            self.fused.entry(fused.chunks).or_default().push(*root);
        }
        let blocks = blocks[known..].to_vec();
        self.by_use.insert(id, id);
        let namespaces = root.namespaces;
        self.runs.insert(id, Run { rows: Arc::new(rows), blocks, parent, root: first, namespaces, used: id });
        self.touch(id);
        self.make_room(0, bound);
    }

    /// Removes runs, those first that were not used for longest, until `bytes` more are within the bound.
    fn make_room(&mut self, bytes: usize, bound: usize) {
        while self.bytes.saturating_add(bytes) > bound {
            let Some((_, oldest)) = self.by_use.pop_first() else { return };
            self.remove(oldest);
        }
    }

    fn remove(&mut self, id: RunId) {
        let Some(run) = self.runs.remove(&id) else { return };
        self.bytes -= run.rows.bytes();
        for block in &run.blocks {
            self.blocks.remove(block);
        }
        if let Some(PrefixRoot { hash, fused: Some(FusedQuestion { chunks, .. }), .. }) = run.root
            && let Some(roots) = self.fused.get_mut(&chunks)
        {
            roots.retain(|root| root.hash != hash);
            if roots.is_empty() {
                self.fused.remove(&chunks);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use refrain_kernels::{Dtype, ReferenceDevice, Slice};
    use refrain_kv::Shape;

    use super::*;

    const SHAPE: Shape = Shape { layers: 2, kv_heads: 2, head_dim: 4 };
    const DEVICE: ReferenceDevice = ReferenceDevice;

    /// A cache whose elements tell layer, head and slot.
    fn cache(capacity: usize, sign: f32) -> KvCache {
        let mut cache = KvCache::vacant(&DEVICE, SHAPE, Dtype::F32, capacity);
        for layer in 0..SHAPE.layers {
            let element = |i: usize| {
                let (head, slot, d) = (i / 4 / capacity, i / 4 % capacity, i % 4);
                sign * (layer * 100_000 + head * 10_000 + slot * 10 + d) as f32
            };
            let values: Vec<f32> = (0..SHAPE.width() * capacity).map(element).collect();
            let upload = || DEVICE.upload_kv(Slice::F32(&values));
            cache.install(layer, LayerCache { k: upload(), v: upload() });
        }
        cache
    }

    fn root(name: u8) -> PrefixRoot {
        PrefixRoot {
            hash: BlockHash([name; 32]),
            fused: None,
            namespaces: [Some(namespace_hash("a")), None],
            forgotten: 0,
        }
    }

    fn tokens(count: usize, seed: u32) -> Vec<u32> {
        (0..count as u32).map(|i| i * 7 + seed).collect()
    }

    fn placed(prefix: &CachedPrefix, layer: usize, capacity: usize) -> Vec<f32> {
        let mut cache = LayerCache::new(&DEVICE, SHAPE, Dtype::F32, capacity);
        prefix.place(&DEVICE, layer, &mut cache, capacity);
        let k = DEVICE.download_kv(&cache.k, 0..cache.k.len()).as_slice().floats();
        assert_eq!(k, DEVICE.download_kv(&cache.v, 0..cache.v.len()).as_slice().floats());
        k
    }

    #[test]
    fn the_longest_prefix_of_whole_blocks_is_found_and_placed_as_it_was() {
        let prefixes = PrefixCache::new(1 << 20);
        let ids = tokens(70, 1);
        prefixes.insert(&DEVICE, &root(0), &ids, &cache(80, 1.0));
        let longer: Vec<u32> = [&ids[..64], &[9; 30]].concat();
        let found = prefixes.find(&root(0), &longer, longer.len() - 1).unwrap();
        assert_eq!(found.len(), 64);
        for layer in 0..2 {
            let placed = placed(&found, layer, 100);
            for head in 0..2 {
                for slot in 0..100 {
                    let expected =
                        if slot < 64 { (layer * 100_000 + head * 10_000 + slot * 10) as f32 } else { 0.0 };
                    assert_eq!(placed[(head * 100 + slot) * 4], expected, "{layer} {head} {slot}");
                }
            }
        }
        assert_eq!(prefixes.find(&root(0), &ids, 63).unwrap().len(), 48);
        assert!(prefixes.find(&root(1), &ids, 69).is_none(), "another root");
        let mut other = ids.clone();
        other[17] += 1;
        assert_eq!(prefixes.find(&root(0), &other, 69).unwrap().len(), 16);
        assert!(prefixes.find(&root(0), &tokens(70, 2), 69).is_none());
    }

    #[test]
    fn what_follows_a_prefix_is_added_to_it_and_branches() {
        let prefixes = PrefixCache::new(1 << 20);
        let ids = tokens(96, 1);
        prefixes.insert(&DEVICE, &root(0), &ids[..40], &cache(40, 1.0));
        let bytes = prefixes.bytes();
        prefixes.insert(&DEVICE, &root(0), &ids, &cache(96, 1.0));
        assert_eq!(prefixes.bytes(), bytes * 3, "32 tokens were there, 64 came");
        prefixes.insert(&DEVICE, &root(0), &ids, &cache(96, -1.0));
        assert_eq!(prefixes.bytes(), bytes * 3);
        let branch: Vec<u32> = [&ids[..50], &tokens(46, 5)].concat();
        prefixes.insert(&DEVICE, &root(0), &branch, &cache(96, -1.0));
        let found = prefixes.find(&root(0), &branch, 96).unwrap();
        assert_eq!((found.len(), found.parts.len()), (96, 3));
        let placed = placed(&found, 0, 96);
        let slot = |slot: usize| placed[slot * 4];
        assert_eq!([slot(47), slot(48), slot(95)], [470.0, -480.0, -950.0]);
        assert_eq!(prefixes.find(&root(0), &ids, 96).unwrap().len(), 96);
    }

    #[test]
    fn what_is_forgotten_does_not_come_back_by_a_prompt_that_was_under_way() {
        let prefixes = PrefixCache::new(1 << 20);
        let [a, b, both] = [["a", ""], ["b", ""], ["c", "a"]].map(|names| {
            let namespaces = names.map(|name| (!name.is_empty()).then(|| namespace_hash(name)));
            PrefixRoot { hash: hash(&[names.concat().as_bytes()], &[]), namespaces, ..root(0) }
        });
        let (ids, full) = (tokens(48, 1), cache(48, 1.0));
        for root in [&a, &b, &both] {
            prefixes.insert(&DEVICE, root, &ids[..32], &full);
            prefixes.insert(&DEVICE, root, &ids, &full);
        }
        let bytes = prefixes.bytes();
        prefixes.forget("a");
        assert_eq!(prefixes.bytes() * 3, bytes);
        let found = |root| prefixes.find(root, &ids, 48).map(|found| found.len());
        assert_eq!([found(&a), found(&b), found(&both)], [None, Some(48), None]);
        prefixes.insert(&DEVICE, &a, &ids, &full);
        assert_eq!(found(&a), None, "the prompt began before");
        let later = PrefixRoot { forgotten: prefixes.clock(), ..a };
        prefixes.insert(&DEVICE, &later, &ids, &full);
        assert_eq!(found(&later), Some(48));
        // What is kept leaves by its age as before.
        let state = prefixes.state();
        assert_eq!(state.by_use.len(), state.runs.len());
    }

    #[test]
    fn prompts_without_documents_are_not_forgotten_unless_they_go_on_from_one() {
        let prefixes = PrefixCache::new(1 << 20);
        let plain = PrefixRoot { namespaces: [None, None], ..root(0) };
        let (alone, over, full) = (tokens(48, 1), tokens(48, 2), cache(48, 1.0));
        prefixes.insert(&DEVICE, &plain, &alone, &full);
        let bytes = prefixes.bytes();
        prefixes.insert(&DEVICE, &root(0), &over[..32], &full);
        prefixes.insert(&DEVICE, &plain, &over, &full);
        prefixes.forget("a");
        assert_eq!(prefixes.bytes(), bytes);
        assert_eq!(prefixes.find(&plain, &alone, 48).map(|found| found.len()), Some(48));
        assert!(prefixes.find(&plain, &over, 48).is_none());
    }

    #[test]
    fn what_was_not_used_for_longest_leaves_first_and_never_before_what_follows_it() {
        let block = BLOCK * SHAPE.token_bytes(Dtype::F32);
        let prefixes = PrefixCache::new(4 * block);
        let full = cache(96, 1.0);
        let (a, b) = (tokens(48, 1), tokens(48, 2));
        prefixes.insert(&DEVICE, &root(0), &a[..32], &full);
        prefixes.insert(&DEVICE, &root(0), &a, &full);
        prefixes.insert(&DEVICE, &root(0), &b[..16], &full);
        assert_eq!(prefixes.bytes(), 4 * block);
        // The end of `a` leaves; its beginning stays, as it was used with it.
        prefixes.insert(&DEVICE, &root(0), &b[..32], &full);
        assert_eq!(prefixes.find(&root(0), &a, 48).unwrap().len(), 32);
        assert_eq!(prefixes.find(&root(0), &b, 48).unwrap().len(), 32);
        // `a` was used before `b`.
        prefixes.insert(&DEVICE, &root(0), &tokens(48, 3), &full);
        assert!(prefixes.find(&root(0), &a, 48).is_none());
        assert!(prefixes.bytes() <= 4 * block);
        // A prompt that is longer than the bound leaves its beginning.
        prefixes.insert(&DEVICE, &root(0), &tokens(96, 4), &full);
        assert_eq!(prefixes.find(&root(0), &tokens(96, 4), 96).unwrap().len(), 64);
        let none = PrefixCache::new(0);
        none.insert(&DEVICE, &root(0), &a, &full);
        assert!(!none.is_on() && none.find(&root(0), &a, 48).is_none());
    }

    #[test]
    fn what_makes_room_may_be_what_a_prompt_goes_on_from() {
        let block = BLOCK * SHAPE.token_bytes(Dtype::F32);
        let prefixes = PrefixCache::new(8 * block);
        let (first, full) = (tokens(112, 1), cache(112, 1.0));
        prefixes.insert(&DEVICE, &root(0), &first, &full);
        let branch = [&first[..16], &tokens(64, 5)].concat();
        prefixes.insert(&DEVICE, &root(0), &branch, &full);
        assert_eq!(prefixes.find(&root(0), &branch, 80).map(|found| found.len()), Some(80));
    }

    /// The root of a prompt over the same chunks, of 16 tokens, whose question is `asked`.
    fn fused(name: u8, asked: &[u32]) -> PrefixRoot {
        PrefixRoot { fused: Some(FusedQuestion::new(BlockHash([9; 32]), asked)), ..root(name) }
    }

    #[test]
    fn a_prompt_that_leaves_takes_no_other_with_the_same_question_with_it() {
        let prefixes = PrefixCache::new(4 * BLOCK * SHAPE.token_bytes(Dtype::F32));
        let (full, ids) = (cache(32, 1.0), tokens(40, 1));
        let of = |name| fused(name, &ids[16..20]);
        prefixes.insert(&DEVICE, &of(1), &ids[..32], &full);
        prefixes.insert(&DEVICE, &of(2), &ids[..32], &full);
        prefixes.insert(&DEVICE, &root(3), &tokens(32, 3), &full);
        assert!(prefixes.find(&of(1), &ids, 32).is_none(), "the first has left");
        let found = prefixes.find_fused(&of(4), &ids, 16).unwrap();
        assert_eq!((found.len(), found.root), (32, of(2)));
    }

    #[test]
    fn a_prompt_with_reused_chunks_is_found_by_those_that_begin_with_its_question() {
        let prefixes = PrefixCache::new(1 << 20);
        let ids = tokens(96, 1);
        let (first, own) = (fused(1, &ids[16..50]), fused(2, &ids[16..90]));
        prefixes.insert(&DEVICE, &first, &ids[..50], &cache(50, 1.0));
        prefixes.insert(&DEVICE, &first, &ids[..80], &cache(80, 1.0));
        let found = |ids: &[u32], least| prefixes.find_fused(&own, ids, least).map(|found| found.len());
        assert_eq!(found(&ids, 16), Some(80));
        // The first prompt ended otherwise than this one goes on behind the question.
        let other = [&ids[..51], &[9; 40]].concat();
        assert_eq!(found(&other, 16), Some(48));
        assert_eq!(found(&ids[..49], 16), None, "the method saw another question");
        assert_eq!(found(&[&ids[..49], &[9; 40]].concat(), 16), None);
        assert_eq!(found(&ids[..10], 10), None);
        let elsewhere = PrefixRoot { fused: Some(FusedQuestion::new(BlockHash([8; 32]), &[])), ..own };
        assert!(prefixes.find_fused(&elsewhere, &ids, 16).is_none());
        let long = tokens(96, 2);
        prefixes.insert(&DEVICE, &fused(3, &long[81..90]), &long[..80], &cache(80, 1.0));
        assert_eq!(found(&long, 81), None, "a part of the chunks alone");
        let mut state = prefixes.state();
        while let Some((_, run)) = state.by_use.pop_first() {
            state.remove(run);
        }
        assert!(state.fused.is_empty() && state.blocks.is_empty() && state.bytes == 0);
    }

    #[test]
    fn prompts_that_end_otherwise_behind_the_same_question_keep_their_own_rows() {
        let prefixes = PrefixCache::new(1 << 20);
        let ids = tokens(96, 1);
        let other = [&ids[..60], &tokens(36, 5)].concat();
        let [one, two] = [1, 2].map(|name| fused(name, &ids[16..50]));
        prefixes.insert(&DEVICE, &one, &ids, &cache(96, 1.0));
        prefixes.insert(&DEVICE, &two, &other, &cache(96, -1.0));
        for (ids, sign) in [(&ids, 1.0), (&other, -1.0)] {
            let found = prefixes.find_fused(&fused(3, &[]), &[&ids[..], &[7]].concat(), 16).unwrap();
            let placed = placed(&found, 0, 96);
            assert_eq!((found.len(), placed[4], placed[95 * 4]), (96, sign * 10.0, sign * 950.0));
        }
    }
}
