//! `refrain chat`: turn by turn at the terminal.

use std::cell::Cell;
use std::io::{self, BufRead, IsTerminal};
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use refrain::Library;
use refrain::engine::{Document, Engine, Error, GenerateRequest, Instructions, Prompt, Sampling};
use refrain::folders::expand_tilde;
use refrain::model::Message;
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::MemHistory;
use rustyline::validate::Validator;
use rustyline::{Behavior, Config, Editor, Helper};
use serde_json::json;

use crate::args::{self, SEARCHABLE};
use crate::ask::{Sourced, answer, as_json, library, searched};
use crate::documents::{each_document, read_documents};
use crate::ingest::ingest_to_answer;
use crate::limits::{check_biases, check_sampling, with_room};
use crate::methods::{self, Method, Policy};
use crate::output::{Fail, NotPrinted, count, paint, print_json, report, say};
use crate::settings::Context;
use crate::signals::{Interrupt, Interrupted, Interruptible};

const HELP: &str = "\
/docs PATH     answer from these documents too
/search N      answer each question from the N chunks that match it best, of
               these documents or, without any, of all that are stored; off
               ends that
/method NAME   answer with this method, for example /method a3:ratio=0.3
/evict NAME    decode with this eviction policy, for example
               /evict morph_kv:capacity=600
/new           forget what was said
/help          this list
/quit          leave; the end of input (Ctrl-D) does the same
Ctrl-C stops an answer or the prefill of documents, and clears a line.
Arrow keys edit the line and bring earlier ones back.
";

/// Most bytes of keys and values that are kept of earlier turns.
const PREFIX_CACHE: usize = 1 << 30;

/// `refrain chat`
pub(crate) fn run(context: &Context, args: &args::Chat) -> Result<()> {
    let sampling = args.sampling.sampling(context.console)?;
    check_sampling(&sampling)?;
    let (method, policy) = (methods::asked(context, &args.method)?, methods::policy(&args.evict)?);
    let documents = read_documents(context.console, &args.prompt.docs)?.documents;
    if args.search.is_some() && documents.is_empty() && context.lacks_store() {
        return Err(context.no_store());
    }
    let around = args.prompt.instructions();
    let engine = context.open_engine(&around)?.with_prefix_cache(PREFIX_CACHE);
    check_biases(&engine, &sampling)?;
    let speculative_tokens = args.speculation.num_speculative_tokens;
    let mut input = Input::open(io::stdin().is_terminal() && !context.json)?;
    let interrupt = input.interrupt()?;
    let mut chat = Chat {
        context,
        engine,
        method,
        policy,
        sampling,
        speculative_tokens,
        documents: Vec::new(),
        library: None,
        search: args.search,
        around,
    };
    chat.add(documents, &interrupt.running())?;
    let talking = matches!(input, Input::Person(_));
    if talking {
        context.say(&paint("2", &format!("{}. /help lists commands.", chat.state()), &io::stderr()));
    }
    while let Some(line) = input.line(context)? {
        match chat.turn(line.trim(), &interrupt.running()) {
            Ok(true) => {}
            Ok(false) => return Ok(()),
            Err(error) if error.is::<Interrupted>() => context.say(&error.to_string()),
            // A person can try again and a script should stop. A closed standard output ends the chat.
            Err(error) if talking && !error.is::<NotPrinted>() => {
                report(&error, false);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The source of a chat's lines.
enum Input {
    /// A person, who edits them and brings earlier ones back.
    Person(Box<Editor<EditedLine, MemHistory>>),
    /// A script, whose lines are read as they are.
    Script(io::Lines<io::StdinLock<'static>>),
}

impl Input {
    fn open(is_person: bool) -> Result<Input> {
        if !is_person {
            return Ok(Input::Script(io::stdin().lock().lines()));
        }
        // Prompt and echo go to the terminal wherever standard output goes.
        let config = Config::builder().auto_add_history(true).behavior(Behavior::PreferTerm).build();
        let mut editor = Editor::with_history(config, MemHistory::new())?;
        editor.set_helper(Some(EditedLine::default()));
        Ok(Input::Person(Box::new(editor)))
    }

    /// Stops answers of a person's chat. A script's ends with the first Ctrl-C, as other programs do.
    fn interrupt(&self) -> io::Result<Interrupt> {
        match self {
            Input::Person(_) => Interrupt::listen(),
            Input::Script(_) => Ok(Interrupt::default()),
        }
    }

    /// The next line; none at the end of input, or after Ctrl-C twice where nothing was typed.
    fn line(&mut self, context: &Context) -> Result<Option<String>> {
        let editor = match self {
            Input::Person(editor) => editor,
            Input::Script(lines) => {
                return lines.next().transpose().with_context(|| {
                    Fail::new("cannot read the next line of standard input").hint("give text in UTF-8")
                });
            }
        };
        let prompt = ("> ", paint("1;36", "> ", &io::stdin()));
        let mut is_second = false;
        loop {
            match editor.readline(&prompt) {
                Ok(line) => return Ok(Some(line)),
                Err(ReadlineError::Eof) => return Ok(None),
                Err(ReadlineError::Interrupted) => {
                    let has_text = editor.helper().is_some_and(|line| line.has_text.get());
                    if is_second && !has_text {
                        return Ok(None);
                    }
                    is_second = !has_text;
                    if is_second {
                        context.say("Ctrl-D, /quit or another Ctrl-C leaves.");
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// The line that a person edits: the editor's error at Ctrl-C does not tell whether it has text.
#[derive(Default)]
struct EditedLine {
    has_text: Cell<bool>,
}

impl Hinter for EditedLine {
    type Hint = String;

    /// Sees the line after every change of it, and gives no hint.
    fn hint(&self, line: &str, _: usize, _: &rustyline::Context<'_>) -> Option<String> {
        self.has_text.set(!line.is_empty());
        None
    }
}

impl Completer for EditedLine {
    type Candidate = String;
}

impl Highlighter for EditedLine {}
impl Validator for EditedLine {}
impl Helper for EditedLine {}

/// A path that a person typed, as [`expand_tilde`] has it: quotes around it are no part of it.
fn typed_path(text: &str) -> PathBuf {
    let unquoted = ['"', '\''].iter().find_map(|quote| text.strip_prefix(*quote)?.strip_suffix(*quote));
    expand_tilde(PathBuf::from(unquoted.unwrap_or(text)))
}

/// The number of chunks that `/search` names, or none where it is `off`.
fn searched_chunks(text: &str) -> Result<Option<u32>> {
    if text == "off" {
        return Ok(None);
    }
    let number = text.parse().ok().filter(|number| SEARCHABLE.contains(&i64::from(*number)));
    let (least, most) = (SEARCHABLE.start(), SEARCHABLE.end());
    let wrong = || Fail::new(format!("{text} is no number of chunks: give {least} to {most}, or off"));
    Ok(Some(number.ok_or_else(wrong)?))
}

struct Chat<'a> {
    context: &'a Context,
    engine: Engine,
    method: Method,
    policy: Policy,
    sampling: Sampling,
    documents: Vec<Document>,
    /// The documents with their index, once a question was searched for in them.
    library: Option<Library>,
    /// Most chunks that a search brings for a question; none where all documents stand in the prompt.
    search: Option<u32>,
    around: Instructions,
    /// Most tokens that are proposed at a time.
    speculative_tokens: usize,
}

impl Chat<'_> {
    /// Takes a line; returns whether to go on. Ctrl-C stops an answer or a prefill as soon as its line is taken.
    fn turn(&mut self, line: &str, running: &Interruptible<'_>) -> Result<bool> {
        let (word, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        match word {
            "" => {}
            "/quit" | "/exit" => return Ok(false),
            // --quiet leaves out remarks, and replies to a command are none.
            "/help" => say(HELP.trim_end()),
            "/new" => {
                self.around.history.clear();
                self.context.say("a new conversation");
            }
            "/method" if !rest.is_empty() => {
                let method = methods::asked(self.context, rest)?;
                self.ingest(&self.documents, &method, self.search, running)?;
                self.method = method;
                self.context.say(&self.state());
            }
            "/evict" if !rest.is_empty() => {
                self.policy = methods::policy(rest)?;
                self.context.say(&self.state());
            }
            "/docs" if !rest.is_empty() => {
                let mut documents = Vec::new();
                each_document(self.context.console, &[typed_path(rest)], |document| {
                    documents.push(document);
                    Ok(running.check()?)
                })?;
                let read = documents.len();
                documents.retain(|document| !self.documents.contains(document));
                if documents.len() < read {
                    let there = count(read - documents.len(), "document");
                    self.context.say(&format!("already there: {there}"));
                }
                self.add(documents, running)?;
                self.context.say(&self.state());
            }
            "/search" if !rest.is_empty() => {
                let search = searched_chunks(rest)?;
                self.ingest(&self.documents, &self.method, search, running)?;
                self.search = search;
                self.context.say(&self.state());
            }
            "/method" | "/evict" | "/docs" | "/search" => say(&self.state()),
            _ if word.starts_with('/') => {
                let fail = Fail::new(format!("there is no command {word}"));
                return Err(fail.hint("/help lists the commands").into());
            }
            _ => self.ask(line, running)?,
        }
        Ok(true)
    }

    fn add(&mut self, documents: Vec<Document>, running: &Interruptible<'_>) -> Result<()> {
        self.ingest(&documents, &self.method, self.search, running)?;
        self.documents.extend(documents);
        self.library = None;
        Ok(())
    }

    /// Ingests documents that stand in the prompt whole; those that are searched are prefilled as far as answers draw on them.
    fn ingest(
        &self,
        documents: &[Document],
        method: &Method,
        search: Option<u32>,
        running: &Interruptible<'_>,
    ) -> Result<()> {
        if search.is_none() && !documents.is_empty() && method.built.reuses() {
            let chunks = self.engine.chunks(documents)?;
            ingest_to_answer(self.context, &self.engine, &chunks, method, running)?;
        }
        Ok(())
    }

    /// The chunks that match a question best, of the chat's documents or, without any, of those in the store. The store's documents are
    /// open for one question at a time, so that other programs can have them in between.
    fn searched(&mut self, question: &str, limit: usize) -> Result<Sourced> {
        let library = match self.library.take() {
            Some(library) => library,
            None => library(self.context, &self.engine, &self.documents)?,
        };
        let whole_documents = !self.method.built.statistics().is_empty();
        let sourced = searched(self.context, &library, question, limit, whole_documents)?;
        self.library = Some(library).filter(|_| !self.documents.is_empty());
        Ok(sourced)
    }

    fn ask(&mut self, question: &str, running: &Interruptible<'_>) -> Result<()> {
        let Sourced { chunks, sources } = match self.search {
            Some(limit) => self.searched(question, limit as usize)?,
            None => Sourced { chunks: self.engine.chunks(&self.documents)?, sources: None },
        };
        let prompt = self.engine.prompt_of_chunks(chunks, question, &self.around)?;
        if self.method.built.reuses() {
            self.engine.ingest_system(&prompt)?;
        }
        let shorter = match (self.has_room_when_new(&prompt, question)?, self.search) {
            (true, _) => "/new forgets what was said",
            (false, Some(_)) => "ask a shorter question, or search for fewer chunks with /search N",
            (false, None) if self.documents.is_empty() => "ask a shorter question",
            (false, None) => "ask a shorter question, or give fewer documents",
        };
        let request = GenerateRequest {
            eviction: self.policy.built.clone(),
            speculative_tokens: self.speculative_tokens,
            ..GenerateRequest::new(self.method.built.clone(), self.fitting_sampling(&prompt, shorter))
        };
        let asked = (&self.method, &self.policy);
        let answer = answer(self.context, &self.engine, &prompt, asked, (&request, None), running)
            .map_err(|error| with_room(error, "start the chat again with --max-tokens", shorter))?;
        if self.context.json {
            let mut value = as_json(&self.method, &self.policy, &answer);
            if let Some(sources) = sources {
                value["sources"] = json!(sources);
            }
            print_json(&value)?;
        }
        let turn =
            |role: &str, content: String| Message { role: role.to_owned(), content, ..Message::default() };
        self.around.history.push(turn("user", question.to_owned()));
        self.around.history.push(turn("assistant", answer.text));
        Ok(())
    }

    /// Whether a new conversation has room for a prompt's question and documents, where the prompt has earlier turns.
    fn has_room_when_new(&self, prompt: &Prompt, question: &str) -> Result<bool> {
        let has_room = |prompt: &Prompt| self.engine.max_seq_len(prompt, 1, &self.policy.built).is_ok();
        if self.around.history.is_empty() || has_room(prompt) {
            return Ok(!self.around.history.is_empty());
        }
        let new = Instructions { history: Vec::new(), ..self.around.clone() };
        Ok(has_room(&self.engine.prompt_of_chunks(prompt.chunks.clone(), question, &new)?))
    }

    /// The sampling of an answer: a default of --max-tokens is cut to the room that the prompt leaves of the context, and `shorter` makes a
    /// shorter prompt.
    fn fitting_sampling(&self, prompt: &Prompt, shorter: &str) -> Sampling {
        let mut sampling = self.sampling.clone();
        let is_default =
            !self.context.max_tokens_given && sampling.max_tokens == Sampling::default().max_tokens;
        let fits = self.engine.max_seq_len(prompt, sampling.max_tokens, &self.policy.built);
        if let (true, Err(Error::PromptTooLong { prompt, context, .. })) = (is_default, fits)
            && prompt < context
        {
            sampling.max_tokens = context - prompt;
            let room = count(sampling.max_tokens, "token");
            self.context.say(&format!("the context has room for {room} of this answer; {shorter}"));
        }
        sampling
    }

    fn state(&self) -> String {
        let documents = match (self.search, self.documents.len()) {
            (Some(_), 0) => "the stored documents".to_owned(),
            (_, given) => count(given, "document"),
        };
        let searched = self.search.map(|limit| format!(" searched for {}", count(limit as usize, "chunk")));
        let documents = documents + &searched.unwrap_or_default();
        let policy = if self.policy.built.is_full() { "" } else { &format!(", {}", self.policy.spec) };
        format!("{} with {}{policy}, {documents}", self.context.global.model, self.method.spec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_help_fits_a_terminal_of_80_columns() {
        for line in HELP.lines() {
            assert!(line.len() <= 78, "{line}");
        }
    }

    #[test]
    fn typed_paths_may_have_quotes_and_the_home_folder() {
        let home = std::env::home_dir().unwrap();
        for (text, path) in [
            ("~/my notes", home.join("my notes")),
            ("'~//notes'", home.join("notes")),
            ("\"a b\"", PathBuf::from("a b")),
            ("'a\"", PathBuf::from("'a\"")),
            ("a~/b", PathBuf::from("a~/b")),
            ("\"", PathBuf::from("\"")),
        ] {
            assert_eq!(typed_path(text), path, "{text}");
        }
    }
}
