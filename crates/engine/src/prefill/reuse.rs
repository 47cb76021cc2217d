//! Parts of a prompt whose keys and values come from the store, or are computed alone where they are missing or broken.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use refrain_fusion::{ChunkStatistics, FusionMethod};
use refrain_kv::{AuxTensors, Span};
use refrain_store::{Chunk, ChunkId, ChunkReader, WantedChunk};

use super::stats::LoadStats;
use crate::Result;
use crate::advance::Advance;
use crate::background::Background;
use crate::engine::Engine;
use crate::ingest::{ChunkPrefill, ChunkWriter, SYSTEM_LABEL, UnstoredChunk, kinds_of};
use crate::prompt::Prompt;

/// A part of the prompt whose keys and values are in the store, or were computed for it just now.
#[derive(Clone, Debug)]
pub(crate) struct Segment {
    /// Index of its chunk in the prompt; none for the system part.
    pub(crate) chunk: Option<usize>,
    pub(crate) span: Span,
    pub(crate) reader: Arc<ChunkReader>,
    /// The method's statistics of it, of each kind.
    pub(crate) statistics: Vec<Arc<AuxTensors>>,
    /// Bytes of statistics that were read from the folder.
    statistics_read: u64,
    /// Whether it was computed for this request.
    pub(crate) computed: bool,
    /// Position of its first token when it was prefilled.
    pub(crate) first_position: u32,
    /// Removals from the store before it was opened.
    pub(crate) removals: u64,
}

/// Cached parts of a prompt, brought in for one answer.
#[derive(Debug)]
pub(crate) struct ReusedSegments {
    pub(crate) segments: Arc<[Segment]>,
    /// Whether the system part's keys and values are at hand.
    pub(crate) system_cached: bool,
    /// Parts that were prefilled alone for this request.
    pub(crate) prefilled: usize,
    /// Parts that were computed because the object store was expected to take longer, or did.
    pub(crate) unfetched: usize,
    /// Bytes of keys and values that were brought in, and the time of all threads.
    pub(crate) load: LoadStats,
    /// Bytes read from the folder by attempts that ended with a broken segment.
    read_before: u64,
    /// Time that the computing thread spent waiting for keys and values.
    pub(crate) waited: Duration,
}

impl ReusedSegments {
    /// Nothing reused. For a method that reuses nothing the system part counts as cached.
    pub(crate) fn none(system_cached: bool) -> ReusedSegments {
        ReusedSegments {
            segments: Arc::new([]),
            system_cached,
            prefilled: 0,
            unfetched: 0,
            load: LoadStats::default(),
            read_before: 0,
            waited: Duration::ZERO,
        }
    }

    /// Bytes of keys, values and statistics that were read from the folder so far. A chunk that comes twice is read once.
    pub(crate) fn bytes_read(&self) -> u64 {
        let mut seen = HashSet::new();
        let read = |segment: &Segment| {
            let first = seen.insert(Arc::as_ptr(&segment.reader));
            segment.statistics_read + if first { segment.reader.bytes_read() } else { 0 }
        };
        self.read_before + self.segments.iter().map(read).sum::<u64>()
    }
}

/// A part that is to be opened.
#[derive(Debug)]
struct Part {
    chunk: Option<usize>,
    span: Span,
    /// The segment that an attempt before used: another one of the same attempt was broken.
    before: Option<Segment>,
}

/// A part that is prefilled alone.
#[derive(Debug)]
struct Computing {
    part: Part,
    chunk: Option<Box<ChunkPrefill>>,
    /// The part's identities under which it is on its way from the object store: computing it and fetching it race.
    late: Vec<ChunkId>,
}

impl Computing {
    /// Computes a layer; gives the part once it is computed, or has come.
    fn advance(
        &mut self,
        engine: &Engine,
        method: &dyn FusionMethod,
        reused: &mut ReusedSegments,
        writer: &mut ChunkWriter,
    ) -> Result<Option<Found>> {
        let (store, statistics) = (engine.store(), wanted(method, self.part.chunk));
        for id in self.late.extract_if(.., |id| !store.is_late(id)) {
            if let Some(found) = find_exactly(engine, &id, &statistics)? {
                store.count_race(true);
                return Ok(Some(found));
            }
        }
        let Some(mut chunk) = self.chunk.take() else { return Ok(None) };
        if !chunk.advance(&statistics)? {
            self.chunk = Some(chunk);
            return Ok(None);
        }
        let unstored = chunk.finish().into_unstored(&kinds_of(&statistics))?;
        writer.store(unstored.clone())?;
        reused.prefilled += 1;
        if !self.late.is_empty() {
            store.count_race(false);
            reused.unfetched += 1;
        }
        let UnstoredChunk { chunk, statistics, .. } = unstored;
        Ok(Some(Found { reader: Arc::new(chunk.into()), statistics, statistics_read: 0, computed: true }))
    }
}

/// A part that the store has, or that was computed.
#[derive(Debug)]
struct Found {
    reader: Arc<ChunkReader>,
    statistics: Vec<Arc<AuxTensors>>,
    statistics_read: u64,
    computed: bool,
}

/// The parts of a prompt on their way from the store.
#[derive(Debug)]
pub(crate) struct Opening {
    parts: VecDeque<Part>,
    /// Removals from the store before any part was opened.
    removals: u64,
    segments: Vec<Segment>,
    /// A part that is prefilled alone.
    computing: Option<Computing>,
    /// A part that is read whole.
    reading: Option<(Part, Segment, Background<Option<Chunk>>)>,
    /// The first parts, up to one that is missing, while they are looked for.
    finding: Option<Background<Result<Vec<Option<Found>>>>>,
}

impl Opening {
    /// The parts that a method may reuse: the system part, if its cache is exact for this request, and all chunks.
    pub(crate) fn new(engine: &Engine, prompt: &Prompt, max_rope_position: usize) -> Opening {
        // A true prefix is exact only under the rotation that the whole request has.
        let decoder = engine.decoder();
        let same_rope = || decoder.ropes(prompt.system.len()) == decoder.ropes(max_rope_position);
        let keeps_system = engine.keeps_system(prompt) && same_rope();
        let system = keeps_system.then(|| Part { chunk: None, span: prompt.system_span(), before: None });
        let chunks = prompt.chunk_spans().into_iter().enumerate();
        let chunks = chunks.map(|(index, span)| Part { chunk: Some(index), span, before: None });
        let parts = system.into_iter().chain(chunks).collect();
        Opening::of(parts, engine.store().removals())
    }

    /// The segments of an attempt that met a broken one: each is read whole into memory, so that the next attempt cannot break.
    /// Those that are broken are treated as if they had never been there.
    pub(crate) fn materialize(reused: &mut ReusedSegments) -> Opening {
        reused.read_before = reused.bytes_read();
        let segments = std::mem::replace(&mut reused.segments, Arc::new([]));
        let part = |segment: &Segment| Part {
            chunk: segment.chunk,
            span: segment.span,
            before: Some(segment.clone()),
        };
        let parts = segments.iter().map(part).collect();
        Opening::of(parts, segments.iter().map(|segment| segment.removals).min().unwrap_or(0))
    }

    fn of(parts: VecDeque<Part>, removals: u64) -> Opening {
        Opening { parts, removals, segments: Vec::new(), computing: None, reading: None, finding: None }
    }

    /// The parts as the object store is asked for them.
    pub(crate) fn wanted(&self, engine: &Engine, prompt: &Prompt) -> Vec<WantedChunk> {
        let wanted = |part: &Part| {
            let left = part.chunk.map_or(&[][..], |index| &prompt.chunks[index].left);
            engine.wanted(part_id(engine, prompt, part.chunk), left)
        };
        self.parts.iter().map(wanted).collect()
    }

    /// Opens parts up to the next that takes time, and waits for one that is looked for or read for `patience` at most. A part that is missing or
    /// broken is prefilled again, and stored by `writer`.
    pub(crate) fn advance(
        &mut self,
        engine: &Engine,
        prompt: &Prompt,
        method: &Arc<dyn FusionMethod>,
        (reused, writer): (&mut ReusedSegments, &mut ChunkWriter),
        patience: Duration,
    ) -> Result<Advance> {
        let until = Instant::now() + patience;
        if let Some(mut computing) = self.computing.take() {
            let Some(found) = computing.advance(engine, method.as_ref(), reused, writer)? else {
                self.computing = Some(computing);
                return Ok(Advance::Progress);
            };
            self.add(engine, prompt, computing.part, found, reused);
        }
        if let Some((part, segment, mut reading)) = self.reading.take() {
            let started = Instant::now();
            let read = reading.poll(patience);
            reused.waited += started.elapsed();
            let Some(chunk) = read else {
                self.reading = Some((part, segment, reading));
                return Ok(Advance::Waiting);
            };
            self.materialized(engine, prompt, (part, segment), chunk, reused)?;
        }
        while self.computing.is_none() && self.reading.is_none() {
            if let Some(mut finding) = self.finding.take() {
                let started = Instant::now();
                let found = finding.poll(until.saturating_duration_since(started));
                reused.waited += started.elapsed();
                let Some(found) = found else {
                    self.finding = Some(finding);
                    return Ok(Advance::Waiting);
                };
                for found in found? {
                    let Some(part) = self.parts.pop_front() else { break };
                    match found {
                        Some(found) => self.add(engine, prompt, part, found, reused),
                        None => {
                            let observed = !wanted(method.as_ref(), part.chunk).is_empty();
                            self.compute(engine, prompt, part, observed)?;
                        }
                    }
                }
                continue;
            }
            let Some(mut part) = self.parts.pop_front() else {
                reused.segments = std::mem::take(&mut self.segments).into();
                return Ok(Advance::Done);
            };
            if let Some(segment) = part.before.take() {
                let reader = segment.reader.clone();
                let reading = Background::spawn("read", move || reader.chunk())?;
                self.reading = Some((part, segment, reading));
            } else if let Some(found) = self.known(&part_id(engine, prompt, part.chunk)) {
                self.add(engine, prompt, part, found, reused);
            } else {
                self.parts.push_front(part);
                self.finding = Some(self.find(engine, prompt, method)?);
            }
        }
        Ok(Advance::Progress)
    }

    /// A chunk that was opened before, since it stands in the prompt twice: it is read once.
    fn known(&self, id: &ChunkId) -> Option<Found> {
        let known = self.segments.iter().find(|segment| segment.reader.id() == id)?;
        Some(Found {
            reader: known.reader.clone(),
            statistics: known.statistics.clone(),
            statistics_read: 0,
            computed: known.computed,
        })
    }

    /// Begins to look for the parts from the first on, up to one that is missing. Files are opened, and statistics read whole, on a thread of its
    /// own, which waits for headers that are on their way from the object store.
    fn find(
        &self,
        engine: &Engine,
        prompt: &Prompt,
        method: &Arc<dyn FusionMethod>,
    ) -> Result<Background<Result<Vec<Option<Found>>>>> {
        let mut parts: Vec<(ChunkId, Option<usize>)> = Vec::new();
        for part in &self.parts {
            let id = part_id(engine, prompt, part.chunk);
            if self.known(&id).is_some() || parts.iter().any(|(earlier, _)| *earlier == id) {
                break;
            }
            parts.push((id, part.chunk));
        }
        let (engine, method) = (engine.clone(), method.clone());
        let look = move || {
            let mut all = Vec::with_capacity(parts.len());
            for (id, chunk) in parts {
                all.push(find(&engine, &id, &wanted(method.as_ref(), chunk))?);
                if let Some(None) = all.last() {
                    break;
                }
            }
            Ok(all)
        };
        Ok(Background::spawn("open", look)?)
    }

    /// Goes on with a segment that was read whole, if it is sound.
    fn materialized(
        &mut self,
        engine: &Engine,
        prompt: &Prompt,
        (part, segment): (Part, Segment),
        chunk: Option<Chunk>,
        reused: &mut ReusedSegments,
    ) -> Result<()> {
        let chunk = match chunk {
            Some(chunk) => Some(chunk),
            // The chunk may stand in the prompt twice, and have been repaired further up.
            None => {
                let known = self.segments.iter().find(|known| known.reader.id() == segment.reader.id());
                known.and_then(|known| known.reader.chunk())
            }
        };
        let Some(chunk) = chunk else {
            let observed = !segment.statistics.is_empty();
            return self.compute(engine, prompt, part, observed);
        };
        let (reader, computed) = (Arc::new(chunk.into()), segment.computed);
        let found = Found { reader, statistics: segment.statistics, statistics_read: 0, computed };
        self.add(engine, prompt, part, found, reused);
        Ok(())
    }

    /// Begins to compute a part. With `observed`, statistics are made of it.
    fn compute(&mut self, engine: &Engine, prompt: &Prompt, part: Part, observed: bool) -> Result<()> {
        let id = part_id(engine, prompt, part.chunk);
        let (left, label) = match part.chunk {
            None => (Vec::new(), SYSTEM_LABEL.to_owned()),
            Some(index) => (prompt.chunks[index].left.clone(), prompt.chunks[index].label()),
        };
        let late = engine.places(&id).filter(|id| engine.store().is_late(id)).collect();
        let chunk = Some(Box::new(ChunkPrefill::start(engine, id, &left, label, observed)?));
        self.computing = Some(Computing { part, chunk, late });
        Ok(())
    }

    fn add(
        &mut self,
        engine: &Engine,
        prompt: &Prompt,
        part: Part,
        found: Found,
        reused: &mut ReusedSegments,
    ) {
        let Found { reader, statistics, statistics_read, computed } = found;
        let first_position = match part.chunk {
            None => 0,
            Some(index) => (engine.before_chunks().len() + prompt.chunks[index].left.len()) as u32,
        };
        reused.system_cached |= part.chunk.is_none();
        let Part { chunk, span, .. } = part;
        self.segments.push(Segment {
            chunk,
            span,
            reader,
            statistics,
            statistics_read,
            computed,
            first_position,
            removals: self.removals,
        });
    }
}

/// The statistics that a method wants of a document; it wants none of the system part.
fn wanted(method: &dyn FusionMethod, chunk: Option<usize>) -> Vec<&dyn ChunkStatistics> {
    if chunk.is_some() { method.statistics() } else { Vec::new() }
}

fn part_id(engine: &Engine, prompt: &Prompt, chunk: Option<usize>) -> ChunkId {
    match chunk {
        None => engine.system_id(&prompt.system),
        Some(index) => engine.chunk_id_in(prompt, index),
    }
}

/// A chunk in the store, or in the shared namespace. One without the wanted statistics counts as missing. The header of one that is on its way from
/// the object store is waited for until the chunk is late.
fn find(engine: &Engine, id: &ChunkId, statistics: &[&dyn ChunkStatistics]) -> Result<Option<Found>> {
    engine.awaits_header([id], None);
    engine.places(id).find_map(|id| find_exactly(engine, &id, statistics).transpose()).transpose()
}

fn find_exactly(engine: &Engine, id: &ChunkId, wanted: &[&dyn ChunkStatistics]) -> Result<Option<Found>> {
    let (store, mut statistics, mut statistics_read) = (engine.store(), Vec::new(), 0);
    for of in wanted {
        let held = store.has_aux_tensors_in_memory(id, &of.kind());
        let Some(found) = store.aux_tensors_at_hand(id, &of.kind())? else { return Ok(None) };
        statistics_read += if held { 0 } else { found.bytes() as u64 };
        statistics.push(found);
    }
    let reader = store.reader_at_hand(id)?.map(Arc::new);
    Ok(reader.map(|reader| Found { reader, statistics, statistics_read, computed: false }))
}

impl Engine {
    /// Reads what a method may reuse of a prompt into the store's memory, whole, as far as it is stored and there is room. A device with memory of
    /// its own copies it from there by itself, as it does once a prompt has found it there.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn load_into_memory(&self, prompt: &Prompt, method: &dyn FusionMethod) -> Result<()> {
        let contexts = self.parts_of(prompt, method);
        for index in 0..contexts.chunks.len() {
            let id = self.chunk_id_in(&contexts, index);
            if let Some(chunk) = self.places(&id).find_map(|id| self.store().get(&id).transpose()) {
                let chunk = chunk?;
                ChunkReader::from(chunk).pin(&**self.decoder().device());
            }
        }
        Ok(())
    }
}
