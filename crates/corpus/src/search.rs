//! BM25 search in the chunks of documents. The index is held in memory and built at every start from the document store.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tantivy::collector::{Count, TopDocs};
use tantivy::query::{
    Bm25StatisticsProvider, BooleanQuery, BoostQuery, ConstScoreQuery, DisjunctionMaxQuery, Occur, Query,
    TermQuery,
};
use tantivy::schema::{
    Field, INDEXED, IndexRecordOption, STORED, STRING, Schema, TextFieldIndexing, TextOptions, Value,
};
use tantivy::{Index, IndexReader, IndexWriter, ReloadPolicy, Searcher, TantivyDocument, Term, doc};

use self::words::{WordTokenizer, forms, in_namespace, indexed, normalized, words};
use crate::error::{Error, Result};

mod words;

/// Memory of the index's writer, in bytes: the least that tantivy accepts.
const WRITER_BYTES: usize = 16 << 20;
/// Most words of a question that are searched for.
const MAX_QUERY_WORDS: usize = 512;
/// Name of [`WordTokenizer`] in the index.
const TOKENIZER: &str = "words";

/// A chunk that a search found.
#[derive(Clone, Debug, PartialEq)]
pub struct Hit {
    /// Id of its document.
    pub document: String,
    /// Index of the chunk in its document.
    pub chunk: u32,
    /// BM25 score.
    pub score: f32,
}

/// An index of the chunks of all namespaces; a search sees one namespace.
pub(crate) struct SearchIndex {
    reader: IndexReader,
    writer: Mutex<IndexWriter>,
    /// Number of the forms of words of each document, by namespace.
    word_counts: Mutex<HashMap<String, HashMap<String, u64>>>,
    fields: Fields,
}

/// BM25's statistics of one namespace, so that other tenants' texts change neither scores nor order.
struct NamespaceStatistics<'a> {
    searcher: &'a Searcher,
    chunks: u64,
    words: u64,
}

impl Bm25StatisticsProvider for NamespaceStatistics<'_> {
    fn total_num_tokens(&self, _: Field) -> tantivy::Result<u64> {
        Ok(self.words)
    }

    fn total_num_docs(&self) -> tantivy::Result<u64> {
        Ok(self.chunks)
    }

    /// A word's term is of one namespace alone.
    fn doc_freq(&self, term: &Term) -> tantivy::Result<u64> {
        count(self.searcher, term)
    }
}

#[derive(Clone, Copy)]
struct Fields {
    /// `NAMESPACE/ID`.
    document: Field,
    namespace: Field,
    chunk: Field,
    /// The namespace and a text of it, whose words are indexed together with the namespace: a search reads nothing of other tenants'
    /// words, and takes no time for them.
    text: Field,
}

/// Number of the chunks that have a term.
fn count(searcher: &Searcher, term: &Term) -> tantivy::Result<u64> {
    Ok(searcher.search(&TermQuery::new(term.clone(), IndexRecordOption::Basic), &Count)? as u64)
}

fn failed(error: tantivy::TantivyError) -> Error {
    Error::Index(error.into())
}

impl SearchIndex {
    pub(crate) fn new() -> Result<SearchIndex> {
        let indexed = TextFieldIndexing::default().set_tokenizer(TOKENIZER);
        let indexed = indexed.set_index_option(IndexRecordOption::WithFreqs);
        let mut schema = Schema::builder();
        let fields = Fields {
            document: schema.add_text_field("document", STRING | STORED),
            namespace: schema.add_text_field("namespace", STRING),
            chunk: schema.add_u64_field("chunk", INDEXED | STORED),
            text: schema.add_text_field("text", TextOptions::default().set_indexing_options(indexed)),
        };
        let index = Index::create_in_ram(schema.build());
        index.tokenizers().register(TOKENIZER, WordTokenizer::default());
        let writer = index.writer_with_num_threads(1, WRITER_BYTES).map_err(failed)?;
        let reader = index.reader_builder().reload_policy(ReloadPolicy::Manual).try_into().map_err(failed)?;
        Ok(SearchIndex { reader, writer: Mutex::new(writer), word_counts: Mutex::default(), fields })
    }

    /// Indexes the chunk texts of documents, given by namespace and id, in place of those that the ids had before.
    pub(crate) fn add(
        &self,
        documents: impl IntoIterator<Item = (String, String, Vec<String>)>,
    ) -> Result<()> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        let Fields { document, namespace: of, chunk, text } = self.fields;
        for (namespace, id, chunks) in documents {
            let name = document_term(&namespace, &id);
            writer.delete_term(Term::from_field_text(document, &name));
            let count = chunks.iter().map(|text| indexed(&normalized(text)).count() as u64).sum();
            for (index, chunk_text) in chunks.iter().enumerate() {
                let entry = doc!(
                    document => name.clone(), of => namespace_term(&namespace), chunk => index as u64,
                    text => in_namespace(&namespace, chunk_text)
                );
                writer.add_document(entry).map_err(failed)?;
            }
            self.word_counts().entry(namespace).or_default().insert(id, count);
        }
        writer.commit().map_err(failed)?;
        self.reader.reload().map_err(failed)
    }

    pub(crate) fn remove(&self, namespace: &str, id: &str) -> Result<()> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        writer.delete_term(Term::from_field_text(self.fields.document, &document_term(namespace, id)));
        self.word_counts().get_mut(namespace).map(|documents| documents.remove(id));
        writer.commit().map_err(failed)?;
        self.reader.reload().map_err(failed)
    }

    fn word_counts(&self) -> MutexGuard<'_, HashMap<String, HashMap<String, u64>>> {
        self.word_counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The `limit` chunks of a namespace that match a question best, best first; ties go to the earlier document and chunk.
    pub(crate) fn search(&self, namespace: &str, question: &str, limit: usize) -> Result<Vec<Hit>> {
        let mut seen = HashSet::new();
        let question = normalized(question);
        let asked = words(&question).filter(|word| seen.insert(word.clone())).take(MAX_QUERY_WORDS);
        let asked: Vec<String> = asked.collect();
        if asked.is_empty() || limit == 0 {
            return Ok(Vec::new());
        }
        let of_namespace = Term::from_field_text(self.fields.namespace, &namespace_term(namespace));
        let searcher = self.reader.searcher();
        let words = self.word_counts().get(namespace).map_or(0, |documents| documents.values().sum());
        let chunks = count(&searcher, &of_namespace).map_err(failed)?;
        let statistics = NamespaceStatistics { searcher: &searcher, chunks, words };
        if statistics.chunks == 0 {
            return Ok(Vec::new());
        }
        let limit = limit.min(usize::try_from(statistics.chunks).unwrap_or(usize::MAX));
        let of = |term: Term, record| -> Box<dyn Query> { Box::new(TermQuery::new(term, record)) };
        // A word counts once in a chunk: by the form of it that scores best.
        let any = asked.into_iter().map(|word| {
            let best = forms(word).map(|(form, weight)| -> Box<dyn Query> {
                let term = Term::from_field_text(self.fields.text, &in_namespace(namespace, &form));
                Box::new(BoostQuery::new(of(term, IndexRecordOption::WithFreqs), weight))
            });
            (Occur::Should, Box::new(DisjunctionMaxQuery::new(best.collect())) as Box<dyn Query>)
        });
        // The namespace adds nothing to the score. Without it tantivy would sum the words' scores in an order that differs from chunk to
        // chunk, and chunks of one score would differ in their last bits.
        let of_namespace = ConstScoreQuery::new(of(of_namespace, IndexRecordOption::Basic), 0.0);
        let query = BooleanQuery::new(vec![
            (Occur::Must, Box::new(BooleanQuery::new(any.collect())) as Box<dyn Query>),
            (Occur::Must, Box::new(of_namespace)),
        ]);
        // Among chunks of one score the collector takes those that were indexed first, which a restart changes. So all of the last
        // score are collected, and sorted below.
        let mut wanted = limit.saturating_add(1);
        let found = loop {
            let best = TopDocs::with_limit(wanted).order_by_score();
            let found =
                searcher.search_with_statistics_provider(&query, &best, &statistics).map_err(failed)?;
            let is_tied = found.len() == wanted && found[limit - 1].0 == found[wanted - 1].0;
            if !is_tied {
                break found;
            }
            wanted = wanted.saturating_mul(2);
        };
        let mut hits = Vec::with_capacity(found.len());
        for (score, address) in found {
            let entry: TantivyDocument = searcher.doc(address).map_err(failed)?;
            let document = entry.get_first(self.fields.document).and_then(|value| value.as_str());
            let chunk = entry.get_first(self.fields.chunk).and_then(|value| value.as_u64());
            if let (Some(document), Some(chunk)) = (document, chunk) {
                let document = document.rsplit_once('/').map_or(document, |(_, id)| id).to_owned();
                hits.push(Hit { document, chunk: chunk as u32, score });
            }
        }
        hits.sort_by(|a, b| {
            b.score.total_cmp(&a.score).then_with(|| (&a.document, a.chunk).cmp(&(&b.document, b.chunk)))
        });
        hits.truncate(limit);
        Ok(hits)
    }
}

fn document_term(namespace: &str, id: &str) -> String {
    format!("{namespace}/{id}")
}

/// The namespace may be empty, and a term may not.
fn namespace_term(namespace: &str) -> String {
    format!("={namespace}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chunk_that_speaks_of_it_is_found_in_its_own_namespace() {
        let search = SearchIndex::new().unwrap();
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        let add = |namespace: &str, documents: Vec<(String, Vec<String>)>| {
            let entry = |(id, texts)| (namespace.to_owned(), id, texts);
            search.add(documents.into_iter().map(entry)).unwrap();
        };
        let torque = texts(&["A stem bolt is tightened to 5 Nm.", "Carbon paste helps."]);
        let wheels = texts(&["The rear wheel has 28 spokes."]);
        add("", vec![("torque".to_owned(), torque), ("wheels".to_owned(), wheels)]);
        add("other", vec![("secret".to_owned(), texts(&["How tight is a stem bolt? Very."]))]);
        let best = |namespace, question, most| search.search(namespace, question, most).unwrap();
        let hits = best("", "How tight is a STEM bolt?", 5);
        assert_eq!((hits[0].document.as_str(), hits[0].chunk), ("torque", 0));
        assert!(hits.iter().all(|hit| hit.document != "secret"));
        assert_eq!(best("", "carbon", 5)[0].chunk, 1);
        assert_eq!(best("", "The wheel, the bolt", 1).len(), 1);
        assert!(
            best("", "", 5).is_empty()
                && best("", "zebra", 5).is_empty()
                && best("none", "bolt", 5).is_empty()
        );
        // Documents of another namespace change no score.
        let before = best("", "stem bolt", 5);
        add("other", vec![("more".to_owned(), texts(&["bolt bolt bolt", "a stem", "stem stem bolt"]))]);
        assert_eq!(best("", "stem bolt", 5), before);
        // The chunks of a word's term are those of one namespace.
        let chunks = |namespace| {
            let term = Term::from_field_text(search.fields.text, &in_namespace(namespace, "bolt"));
            count(&search.reader.searcher(), &term).unwrap()
        };
        assert_eq!((chunks(""), chunks("other"), chunks("none")), (1, 3, 0));
        // Chunks of one score come in the order of their documents, whichever was indexed first.
        let twins = (0..9).rev().map(|index| (format!("twin {index}"), texts(&["a hub gear"]))).collect();
        add("twins", twins);
        let found: Vec<String> = best("twins", "hub", 3).into_iter().map(|hit| hit.document).collect();
        assert_eq!(found, ["twin 0", "twin 1", "twin 2"]);
        assert_eq!(best("twins", "hub", usize::MAX).len(), 9);
        // A question is words, never a query in tantivy's language.
        assert!(best("", "\"stem AND (NOT text:*", 5).len() == 1);
        add("", vec![("torque".to_owned(), texts(&["Nothing of it is left."]))]);
        assert!(best("", "stem", 5).is_empty());
        // Scripts without spaces, and words with marks and capitals.
        let foreign = [
            ("bolt", "螺栓用五牛米的力矩拧紧。请使用碳纤维膏。"),
            ("wheel", "後輪には二十八本のスポークがあります。"),
            ("straße", "Die STRASSE über Köln, ÇA VA."),
        ];
        add("", foreign.map(|(id, text)| (id.to_owned(), texts(&[text]))).to_vec());
        assert_eq!(best("", "螺栓的力矩是多少？", 1)[0].document, "bolt");
        assert_eq!(best("", "後輪のスポーク", 1)[0].document, "wheel");
        assert_eq!(best("", "köln ça", 1)[0].document, "straße");
        assert_eq!(best("", "Straße", 1)[0].document, "straße");
        let french = texts(&["L’eau bout à 100 °C.", "Voir le fichier max_body.yaml."]);
        add("", vec![("eau".to_owned(), french)]);
        let found = |question| (best("", question, 1)[0].document.clone(), best("", question, 1)[0].chunk);
        assert_eq!((found("eau ?"), found("yaml")), (("eau".to_owned(), 0), ("eau".to_owned(), 1)));
        search.remove("", "wheels").unwrap();
        assert!(best("", "spokes", 5).is_empty());
    }

    #[test]
    fn other_forms_of_a_word_are_found_behind_the_word_itself() {
        let search = SearchIndex::new().unwrap();
        let texts = [
            ("bicycle", "北京的自行车租赁费用为每小时五元。"),
            ("cafe", "Café Łódź"),
            ("employees", "All employees, all expenses, all policies."),
            ("employer", "An employer, one expense, one policy."),
            ("holiday", "Der Urlaubsantrag ist vor den Kündigungsfristen zu stellen."),
            ("server", "An HTTPServer2 of 20kg."),
            ("water", "上海自来水来自海上,行车安全。"),
        ];
        let entry = |(id, text): (&str, &str)| (String::new(), id.to_owned(), vec![text.to_owned()]);
        search.add(texts.map(entry)).unwrap();
        let found = |question| {
            let hits = search.search("", question, 5).unwrap();
            hits.into_iter().map(|hit| hit.document).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(found("policy"), "employer employees");
        assert_eq!(found("policies"), "employees employer");
        assert_eq!(found("an employee"), "employer server employees");
        assert_eq!((found("Urlaub"), found("Kundigungsfrist")), ("holiday".to_owned(), "holiday".to_owned()));
        assert_eq!((found("cafe"), found("lodz")), ("cafe".to_owned(), "cafe".to_owned()));
        assert_eq!((found("http server"), found("20 kg")), ("server".to_owned(), "server".to_owned()));
        assert_eq!(found("自行车"), "bicycle water");
        // Letters with and without marks score alike, and a word with both forms counts once.
        let score = |question| search.search("", question, 1).unwrap()[0].score;
        assert_eq!(score("café"), score("cafe"));
    }
}
