//! Chunks that are the mean of several prefills, each behind other text.
//!
//! A chunk's keys and values depend on the text before it. Their mean over several texts keeps what all of these have in common, and is
//! nearer to the keys and values behind any further text than those behind one text are. A chunk right behind the system part is exact
//! there, and is no mean.

use std::sync::Arc;

use refrain_store::ChunkId;

use super::prefilled_prefix::{AveragedPrefixes, PrefilledPrefix};
use crate::Result;
use crate::engine::Engine;

/// Texts that stand between the prefix and a chunk: articles of a reference work, and a letter.
const FILLERS: [&str; 2] = [
    "Document (Title: Harbour of Lindeby) Lindeby is a town at the mouth of the river Aven, known for its long wooden pier and its \
     rope works. The harbour was deepened in 1871, after which larger ships could load timber and slate from the hills inland. A \
     railway followed eight years later. Today some four thousand people live there, most of whom work in fishing, boat building or \
     for the regional hospital.\n\nDocument (Title: Marten Oskar Vale) Marten Oskar Vale (2 May 1902 – 19 October 1968) was an \
     engineer and teacher. He studied in the capital, built three bridges over the upper Aven, and wrote a handbook on the strength of \
     stone arches that was in print until 1990. His sister Edith was a painter.\n\n",
    "I used to think that the hard part of making something was to begin. Now it seems to me that beginning is easy, because nobody \
     expects anything of you yet, and least of all you yourself. The hard part comes in the middle, when the first idea has shown its \
     faults and the second one has not arrived. Most people stop there. They say that they lost interest, but what they lost was the \
     belief that the next week would be better than the last one. What helped me was to keep the work so small that I could finish a \
     piece of it every evening, however poor, and to show it to somebody who would tell me the truth. If you do that for long enough, \
     you find that you are done.\n\n",
];

impl Engine {
    /// The tokens before chunks with each filler behind them.
    pub(crate) fn averaged_prefixes(&self) -> Result<AveragedPrefixes> {
        let (before, mut all) = (self.before_chunks(), Vec::new());
        let (most, mut prefixes) = (self.decoder().config().context / 4, Vec::new());
        for filler in FILLERS {
            let filler = self.tokenize(filler)?;
            let tokens = [before.as_slice(), &filler[..filler.len().min(most)]].concat();
            all.extend([tokens.as_slice(), &[u32::MAX]].concat());
            prefixes.push(Arc::new(PrefilledPrefix::new(tokens)));
        }
        Ok(AveragedPrefixes { prefixes, digest: ChunkId::digest(&all) })
    }
}
