"""The words of captions: synonyms for each word of the vocabulary, phrases, and common words that say nothing.

Only lower-case letters; `gerund|finite` gives the two forms of a verb phrase. The first entry of each list is the
canonical one.
"""

KIND_WORDS: dict[str, tuple[str, ...]] = {
    "ball": ("ball", "ball", "ball", "sphere", "round ball"),
    "square": ("square", "square", "square", "box", "cube", "block"),
    "triangle": ("triangle", "triangle", "triangle", "pyramid"),
    "star": ("star", "star", "star", "five pointed star"),
    "car": ("car", "car", "car", "automobile", "toy car"),
    "boat": ("boat", "boat", "boat", "sailboat", "ship"),
    "tree": ("tree", "tree", "tree", "leafy tree"),
    "house": ("house", "house", "house", "home", "cottage", "hut"),
    "bird": ("bird", "bird", "bird", "birdie"),
    "sun": ("sun", "sun", "sun", "shining sun"),
    "moon": ("moon", "moon", "moon", "crescent moon", "half moon"),
}

COLOR_WORDS: dict[str, tuple[str, ...]] = {
    "red": ("red", "red", "red", "bright red", "crimson", "scarlet"),
    "orange": ("orange", "orange", "orange", "bright orange"),
    "yellow": ("yellow", "yellow", "yellow", "bright yellow", "golden"),
    "green": ("green", "green", "green", "emerald"),
    "cyan": ("cyan", "cyan", "cyan", "turquoise", "aqua", "teal"),
    "blue": ("blue", "blue", "blue", "deep blue"),
    "purple": ("purple", "purple", "purple", "violet"),
    "pink": ("pink", "pink", "pink", "rosy"),
    "white": ("white", "white", "white", "pure white"),
    "black": ("black", "black", "black", "jet black"),
}

SIZE_WORDS: dict[str, tuple[str, ...]] = {
    "small": ("small", "small", "little", "tiny"),
    "medium": ("medium", "medium sized", "middle sized"),
    "large": ("large", "large", "big", "big", "huge", "giant"),
}

# Verbs of sideways motion by kind, beside those that suit any.
ANY_MOVE = ("moving|moves", "moving|moves", "sliding|slides", "gliding|glides", "going|goes", "traveling|travels")
KIND_MOVES: dict[str, tuple[str, ...]] = {
    "ball": ("rolling|rolls",),
    "car": ("driving|drives", "racing|races", "rolling|rolls"),
    "boat": ("sailing|sails", "drifting|drifts", "floating|floats"),
    "bird": ("flying|flies", "flying|flies"),
    "star": ("drifting|drifts", "flying|flies"),
    "sun": ("drifting|drifts", "crossing|crosses"),
    "moon": ("drifting|drifts", "wandering|wanders"),
}
SIDE_TAILS: dict[str, tuple[str, ...]] = {
    "left": ("left", "left", "to the left", "to the left", "leftward", "from right to left", "towards the left"),
    "right": ("right", "right", "to the right", "to the right", "rightward", "from left to right", "towards the right"),
}
MOTION_WORDS: dict[str, tuple[str, ...]] = {
    "up": (
        "moving up|moves up", "rising|rises", "rising up|rises up", "floating up|floats up", "going up|goes up",
        "climbing up|climbs up", "moving upward|moves upward", "lifting up|lifts up", "flying up|flies up",
    ),
    "down": (
        "moving down|moves down", "falling|falls", "falling down|falls down", "sinking|sinks", "going down|goes down",
        "dropping down|drops down", "moving downward|moves downward", "descending|descends", "coming down|comes down",
    ),
    "growing": (
        "growing|grows", "growing bigger|grows bigger", "getting bigger|gets bigger", "growing larger|grows larger",
        "becoming larger|becomes larger", "getting larger|gets larger", "expanding|expands", "swelling|swells",
    ),
    "shrinking": (
        "shrinking|shrinks", "getting smaller|gets smaller", "becoming smaller|becomes smaller",
        "growing smaller|grows smaller", "shrinking away|shrinks away", "dwindling|dwindles",
    ),
    "bouncing": (
        "bouncing|bounces", "bouncing up and down|bounces up and down", "hopping|hops",
        "jumping up and down|jumps up and down",
        "hopping up and down|hops up and down", "jumping|jumps", "bouncing on the spot|bounces on the spot",
    ),
    "spinning": (
        "spinning|spins", "spinning around|spins around", "rotating|rotates", "turning around|turns around",
        "twirling|twirls", "spinning in place|spins in place", "whirling|whirls", "turning in circles|turns in circles",
    ),
    "still": (
        "standing still|stands still", "staying still|stays still", "resting|rests", "holding still|holds still",
        "sitting still|sits still", "staying in place|stays in place", "not moving|does not move", "waiting|waits",
    ),
}  # fmt: skip
ADVERBS = ("slowly", "gently", "quietly", "smoothly", "steadily", "calmly", "happily", "softly")

# `{}` is the colour. Each backdrop has phrases that close a sentence or open it, and sentences of their own.
PLAIN_PHRASES = (
    "on a {} background", "on a {} background", "on a plain {} background", "against a {} background",
    "in front of a {} background", "in front of a {} wall", "with a {} background", "against a plain {} backdrop",
    "before a {} backdrop", "on a simple {} background", "over a {} background",
)  # fmt: skip
PLAIN_SENTENCES = (
    "the background is {}",
    "the background is plain {}",
    "everything behind is {}",
    "the backdrop is {}",
)
SCENE_PHRASES: dict[str, tuple[str, ...]] = {
    "day": (
        "on a sunny day", "in the daytime", "by day", "on a green meadow by day", "under a blue sky",
        "in a green field",
        "on green hills", "in bright daylight", "in the countryside", "in a park on a clear day",
    ),
    "night": (
        "at night", "in the night", "under a starry sky", "under the night sky", "in the dark of night",
        "on a starry night", "at midnight", "under the stars",
    ),
    "sea": (
        "at sea", "on the sea", "on the ocean", "over the water", "on the waves", "by the sea", "at the seaside",
        "on the blue ocean", "on the open sea",
    ),
    "snow": (
        "in the snow", "in falling snow", "on a snowy day", "in winter", "in a snowy landscape", "while snow falls",
        "among snowy mountains", "in a winter landscape", "on the snow",
    ),
    "rain": (
        "in the rain", "on a rainy day", "while it rains", "in a rainstorm", "under gray rain clouds",
        "in rainy weather",
        "in the pouring rain", "in a storm",
    ),
    "city": (
        "in the city", "in a city street", "in front of a city skyline", "in town", "among tall buildings", "downtown",
        "in front of tall buildings", "on a city road", "in front of skyscrapers",
    ),
    "nightfall": (
        "as day turns to night", "while day turns to night", "as night falls", "as the day becomes night",
        "at nightfall",
        "while it gets dark", "from day to night", "as evening turns into night", "at dusk as darkness falls",
    ),
}  # fmt: skip
SCENE_SENTENCES: dict[str, tuple[str, ...]] = {
    "day": ("it is a sunny day", "the sky is blue and the grass is green", "it is daytime"),
    "night": ("it is night", "it is a starry night", "stars fill the night sky"),
    "sea": ("the sea is all around", "waves roll on the ocean", "it is out at sea"),
    "snow": ("it is snowing", "snow is falling", "it is winter"),
    "rain": ("it is raining", "rain is falling", "the weather is rainy"),
    "city": ("the city is in the background", "tall buildings stand behind", "it is in the city"),
    "nightfall": ("day turns to night", "night falls", "the sky turns from day to night"),
}

CAMERA_PHRASES: dict[str, tuple[str, ...]] = {
    "none": ("static camera", "the camera does not move", "fixed camera", "the camera holds still"),
    "pan left": (
        "the camera pans left", "the camera pans to the left", "camera panning left", "the camera turns left",
        "the view pans to the left",
    ),
    "pan right": (
        "the camera pans right", "the camera pans to the right", "camera panning right", "the camera turns right",
        "the view pans to the right",
    ),
    "zoom in": (
        "the camera zooms in", "the camera slowly zooms in", "camera zooming in", "the camera moves closer",
        "the view zooms in", "the camera pushes in",
    ),
    "zoom out": (
        "the camera zooms out", "the camera slowly zooms out", "camera zooming out", "the camera moves away",
        "the view zooms out", "the camera pulls back",
    ),
}  # fmt: skip

RELATION_PHRASES: dict[str, tuple[str, ...]] = {
    "left of": ("to the left of", "to the left of", "left of", "on the left of"),
    "right of": ("to the right of", "to the right of", "right of", "on the right of"),
    "above": ("above", "above", "over", "high above"),
    "below": ("below", "below", "under", "beneath", "underneath"),
}

OPENINGS = (
    "a video of",
    "a clip of",
    "an animation of",
    "a shot of",
    "a scene with",
    "a view of",
    "we see",
    "there is",
)
ADJECTIVES = (
    "shiny",
    "pretty",
    "simple",
    "single",
    "lonely",
    "lovely",
    "nice",
    "colorful",
    "cute",
    "smooth",
    "cheerful",
)

# Words that users and language models sprinkle over prompts; a caption may carry some of them as filler.
COMMON = tuple(
    """
    about above across action adventure after again air alive all alone along also always amazing ancient and animated
    another appears area around art as asleep atmosphere away baby background beach beautiful bed before begins behind
    being below bench beside best between beyond bottom boy breeze bridge bring but by calls camera can captures care
    cartoon center centered charming child cinematic circle clean clear close closer closeup cloud clouds cloudy cold
    comes continues cool corner cozy crisp curious cut cuts dance dancing day deep delicate detail detailed distance
    door down dramatic dream dreamy drops during each early earth edge effect elegant empty end ending ends enters
    epic even ever every everything exactly explores eye face fade fades falling family fantasy far fast favorite
    feeling field fills film final finally finds first five flat flight flower follows for forest forever four frame
    framing fresh friend friends from front full fun gaze gentle girl glow glowing glows golden good grass great ground
    group hangs happy hard has he heart heavy her here hero high hill hills his hold home hope horizon hour how i idea
    illuminated image in inside into is island it its journey joy joyful just keeps kind lake land landscape last late
    leaves leaving lies life light lighting lights like line lines little lives long look looking looks loud love low
    magic magical main make makes many mellow middle minimal mist moment mood morning motion mountain mountains move
    movement movie much music my mysterious nature near nearby never new next no noon nothing now of off old on once
    one only onto open or other our out outside over park part passes past path peaceful people perfect picture place
    plays point pond quick quiet quite rainbow reaches real realistic reflection remains returns reveals river road
    rock room round running sand scene sea search seen sets seven shadow shadows shape she shimmering shines shining
    shore short shot show shows side sight silent silhouette sits six sky sleeping slow small so soft solid some
    something soon sound space sparkling spring stands start starts stays steps still stop stops storm story straight
    street strong style summer sunlight sunny sunrise sunset sunshine surface surrounded sweet swiftly take takes tall
    ten texture that the their them then they thing this three through tilt time tiny to together top toward toy
    track tracking trail tranquil travel travels two under until up upon very view vivid voyage waits walk walking
    wall warm watches water wave way we weather where which while whole wide wild will wind window with wonder wonderful
    world yellow yet you young
    """.split()  # noqa: SIM905
)
